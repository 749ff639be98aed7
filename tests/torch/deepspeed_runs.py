"""What the workers of the tests of DeepSpeed run: each stage of ZeRO, in a plain loop."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import StepMeasured
from evenstep.torch import Balancer, Runtime

from ..network.torch.networks import Turning
from .loops import text_of
from .sharded import PER_SAMPLE_S, slow_layers

STAGES = (0, 1, 2, 3)
PER_RANK, NUM_STEPS = 8, 6


def engine_of(model: nn.Module, stage: int, num_parts: int = 1) -> Any:
    """Return an engine on the CPU, which steps by SGD."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": PER_RANK,
        "gradient_accumulation_steps": num_parts,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 10,  # so that each layer reduces by itself
            "stage3_param_persistence_threshold": 0,  # and gathers
        },
        "gradient_clipping": 0.0,  # 1.0 by default
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def trained(rank: int, stage: int, num_parts: int) -> tuple[float, int]:
    """Return how far parameters are from those of one process, and how many sizes there were."""
    from deepspeed import zero

    torch.manual_seed(1)
    num_samples = NUM_STEPS * num_parts * 2 * PER_RANK
    x, y = torch.randn(num_samples, 6), torch.randn(num_samples, 1)
    sizes = set()
    with Balancer(policy=Turning((11, 5)), runtime=Runtime(line_every=None)) as balancer:
        stock = DataLoader(TensorDataset(x, y), batch_size=PER_RANK)
        engine, loader = balancer.prepare(engine_of(net(), stage, num_parts), stock)
        for mine, targets in loader:
            engine.backward(functional.mse_loss(engine(mine), targets))
            engine.step()
            sizes.add(balancer.batch_sizes)
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number, rows in enumerate(torch.arange(num_samples).split(2 * PER_RANK), start=1):
        (functional.mse_loss(alone(x[rows]), y[rows]) / num_parts).backward()
        if number % num_parts == 0:
            optimizer.step()
            optimizer.zero_grad()
    with zero.GatheredParameters(list(engine.module.parameters()) if stage == 3 else []):
        ours = torch.cat([p.detach().flatten() for p in engine.module.parameters()])
    theirs = torch.cat([p.detach().flatten() for p in alone.parameters()])
    return float((ours - theirs).norm() / theirs.norm()), len(sizes)


def clocked(rank: int, stage: int) -> tuple[Any, tuple[int, ...]]:
    """Return every rank's median seconds a sample, and where `auto` takes the sizes."""
    events: list[StepMeasured] = []

    def hook(event: object) -> None:
        if isinstance(event, StepMeasured):
            events.append(event)

    runtime = Runtime(line_every=None, hooks=(hook,))
    with Balancer(runtime=runtime) as balancer:
        stock = DataLoader(TensorDataset(torch.randn(40 * 14, 4)), batch_size=20)
        model, loader = balancer.prepare(engine_of(slow_layers(PER_SAMPLE_S[rank]), stage), stock)
        for (x,) in loader:
            model.backward(model(x).square().mean())
            model.step()
        sizes = balancer.batch_sizes
    rates = [np.divide(event.compute_s, event.batch_size) for event in events[3:]]
    return (np.median(rates, axis=0) if rates else None), sizes


def micro_batches() -> None:
    stock = DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=PER_RANK)
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        _, loader = balancer.prepare(engine_of(net(), 1), stock)
        next(loader.steps())


def every_stage(rank: int) -> dict[str, Any]:
    """Return what became of each stage."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    exact = {(stage, parts): trained(rank, stage, parts) for stage in STAGES for parts in (1, 2)}
    clocks = {stage: clocked(rank, stage) for stage in STAGES}
    return {"exact": exact, "clocks": clocks, "refused": text_of(micro_batches)}
