"""What the workers of the FSDP2 tests run."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from time import sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import StepMeasured
from evenstep.exceptions import WorkerLostError
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

from .loops import text_of
from .matrix import BATCH_SIZE, QUIET, flat, network, parameters, samples
from .runs import Card

PER_SAMPLE_S = (0.001, 0.01)  # in forward and backward together, by rank


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sleep(ctx.seconds)
        return grads[0], None


class SlowLayer(nn.Module):
    """A layer that takes its time per sample, half in the forward, half in the backward."""

    def __init__(self, per_sample_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = per_sample_s / 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(_Slow.apply(x, len(x) * self.seconds)))


def slow_layers(per_sample_s: float) -> nn.Sequential:
    """Return five layers, which together take so long."""
    torch.manual_seed(0)
    return nn.Sequential(*[SlowLayer(per_sample_s / 5) for _ in range(5)])


def slow_model(rank: int) -> nn.Module:
    """Return five layers, each sharded, which together take this rank's time."""
    model = slow_layers(PER_SAMPLE_S[rank])
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def slow_stock(num_steps: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(40 * num_steps, 4)), batch_size=20)


class OwnGather(DefaultAllGather):
    """A collective of the script's own, whose waits nobody sees."""


def measured(
    rank: int, policy: Any, num_steps: int, *, steps: bool = False, own_gather: bool = False
) -> dict[str, Any]:
    """Return each rank's least compute time, sizes at the end, warnings, and forwards by step."""
    events: list[StepMeasured] = []

    def hook(event: object) -> None:
        if isinstance(event, StepMeasured):
            events.append(event)

    model, counts = slow_model(rank), []
    for layer in [*model, model] if own_gather else []:
        layer.set_custom_all_gather(OwnGather())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runtime = Runtime(line_every=None, hooks=(hook,))
        with Balancer(policy=policy, runtime=runtime) as balancer:
            model, loader = balancer.prepare(model, slow_stock(num_steps))
            for step in loader.steps() if steps else ([batch] for batch in loader):
                for (x,) in step:
                    model(x).square().mean().backward()
                counts.append(step.num_micro_batches if steps else 1)
            sizes = balancer.batch_sizes
    return {
        "compute_s": np.min([event.compute_s for event in events], axis=0) if events else None,
        "sizes": sizes,
        "warned": [str(warning.message) for warning in caught],
        "counts": counts,
    }


def clock(rank: int) -> dict[str, Any]:
    """Return what is measured at sizes that were given, and where `auto` takes them, by loop."""
    found = {}
    for loop, steps in (("plain", False), ("steps", True)):
        found[loop, "given"] = measured(rank, Fixed((20, 20)), 6, steps=steps)
        found[loop, "auto"] = measured(rank, "auto", 16, steps=steps)
    found["own", "auto"] = measured(rank, "auto", 4, own_gather=True)
    return found


def grown(rank: int, room: int) -> list[int]:
    """Return the sizes of a rank whose card has room for so many samples."""
    card, sizes = Card(room), []
    with Balancer(runtime=Runtime(line_every=None, memory=card)) as balancer:
        model, loader = balancer.prepare(slow_model(rank), slow_stock(16))
        for (x,) in loader:
            card.peak = 1000 * (2 + len(x))
            model(x).square().mean().backward()
            sizes.append(len(x))
    return sizes


def alive(rank: int) -> dict[str, Any]:
    """Return what is whole at each hook of a step, by loop, in plain FSDP2 and balanced."""
    found: dict[str, Any] = {}
    for loop, most, num_forwards in (("plain", None, 1), ("steps", None, 1), ("cut", 6, 3)):
        plain, seen = _observed()
        for number in range(num_forwards):
            plain.set_requires_gradient_sync(number == num_forwards - 1)
            plain(torch.randn(5, 4)).square().mean().backward()
        theirs, ours = list(seen), []
        with Balancer(policy=Fixed((14, 6)), bounds=Bounds(max=most), runtime=QUIET) as balancer:
            model, seen = _observed()
            dataset = TensorDataset(torch.randn(40, 4))
            model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=10))
            for step in loader.steps() if loop != "plain" else ([batch] for batch in loader):
                seen.clear()
                sizes = []
                for (x,) in step:
                    model(x).square().mean().backward()
                    sizes.append(len(x))
                ours.append(list(seen))
        found[loop] = {"theirs": theirs, "ours": ours, "sizes": sizes}
    return found


def _observed() -> tuple[nn.Module, list[Any]]:
    """Return three sharded layers, and what is seen at the hooks of each: how much is whole."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    seen: list[Any] = []

    def look(name: str) -> None:
        states = [layer._get_fsdp_state() for layer in model]  # the model itself has no parameters
        groups = [state._fsdp_param_groups[0] for state in states]
        whole = [p for group in groups if group.is_unsharded for p in group.fsdp_params]
        grads = [
            getattr(p, "_unsharded_param", None) for group in groups for p in group.fsdp_params
        ]
        of_grads = [p.grad.numel() for p in grads if p is not None and p.grad is not None]
        seen.append((name, sum(p.unsharded_param.numel() for p in whole), sum(of_grads)))

    for number, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, n=number: look(f"before {n}"))
        layer.register_forward_hook(lambda *_, n=number: look(f"after {n}"))
        layer.register_full_backward_pre_hook(lambda *_, n=number: look(f"backward {n}"))
    return model, seen


def sharded(mesh: Any = None) -> nn.Module:
    """Return the network of the matrix, sharded layer by layer."""
    model = network(torch.float64)
    for layer in list(model.children()):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def stock() -> DataLoader:
    return DataLoader(samples(torch.float64), batch_size=BATCH_SIZE)


def partly() -> None:
    model = network(torch.float64)
    fully_shard(model.head)
    Balancer(runtime=QUIET).prepare(model, stock())


def other_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    Balancer(runtime=QUIET).prepare(sharded(mesh["tp"]), stock())


def older() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(network(torch.float64), device_id=torch.device("cpu"))
    Balancer(runtime=QUIET).prepare(model, stock())


def sync_batch_norm() -> None:
    model = nn.Sequential(network(torch.float64), nn.SyncBatchNorm(5).double())
    _, loader = Balancer(runtime=QUIET).prepare(fully_shard(model), stock())
    next(loader.steps())


MISTAKES = {
    "sync batch norm": (sync_batch_norm, "have no SyncBatchNorm, in which ranks would wait"),
    "partly": (partly, "be sharded as a whole, got Net, only parts of which are. Call"),
    "other ranks": (other_ranks, "an FSDP model sharded over [0]. Give the mesh's data-parallel"),
    "older": (older, "with FSDP1's `FullyShardedDataParallel`. Shard the model with"),
}


def mistakes(rank: int) -> dict[str, str]:
    """Return the error's text of every mistake."""
    return {name: text_of(mistake) for name, (mistake, _) in MISTAKES.items()}


def interrupted(rank: int) -> list[float]:
    """Return the errors of steps between evaluations, states saved, and a loop that was left."""
    errors = []
    policy = Fixed((11, 5))
    x, y = samples(torch.float64).tensors
    with Balancer(policy=policy, bounds=Bounds(max=3), runtime=QUIET) as balancer:
        model, loader = balancer.prepare(sharded(), stock())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone = network(torch.float64)
        theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
        for step in loader.steps():  # left in the middle of a step, nothing reduced yet
            for mine, classes in step:
                functional.cross_entropy(model(mine), classes).backward()
                break
            break
        model.zero_grad()
        for number, step in enumerate(loader.steps()):
            for mine, classes in step:
                functional.cross_entropy(model(mine), classes).backward()
            part = slice(16 * number, 16 * number + 16)
            functional.cross_entropy(alone(x[part]), y[part]).backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
            with torch.no_grad():
                errors.append(float((model(x[:4]) - alone(x[:4])).norm()))
            for one in (optimizer, theirs):
                one.step()
                one.zero_grad()
            with torch.no_grad():
                errors.append(float((model(x[:4]) - alone(x[:4])).norm()))
            assert all(dist.tensor.DTensor is type(p) for p in model.state_dict().values())
    errors.append(float((parameters(model) - parameters(alone)).norm()))
    return errors


def undivided(rank: int) -> list[float]:
    """Return errors where FSDP2 sums, as torchtitan has it: the loss is divided by all samples."""
    x, y = samples(torch.float64).tensors
    errors = []
    with Balancer(policy=Fixed((11, 5)), runtime=QUIET, loss_reduction="sum") as balancer:
        model, loader = balancer.prepare(sharded(), stock())
        for layer in [*model.children(), model]:
            layer.set_gradient_divide_factor(1.0)
        for number, (mine, classes) in enumerate(loader):
            (functional.cross_entropy(model(mine), classes, reduction="sum") / 16).backward()
            alone, part = network(torch.float64), slice(16 * number, 16 * number + 16)
            functional.cross_entropy(alone(x[part]), y[part]).backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
            model.zero_grad()
    return errors


def hybrid(rank: int) -> list[float]:
    """Return errors where two groups of two ranks shard, and each shard is held twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    x, y = samples(torch.float64).tensors
    errors = []
    bounds = Bounds(vary="count", granularity=2)
    policy = Fixed((16, 4, 4, 8))
    with Balancer(policy=policy, bounds=bounds, runtime=QUIET) as balancer:
        model, loader = balancer.prepare(sharded(mesh), stock())
        for number, step in enumerate(loader.steps()):
            for mine, classes in step:
                functional.cross_entropy(model(mine), classes).backward()
            alone, part = network(torch.float64), slice(32 * number, 32 * number + 32)
            functional.cross_entropy(alone(x[part]), y[part]).backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
            model.zero_grad()
    return errors


class SlowNet(nn.Module):
    """Two layers cut across two ranks, one that is not, and ranks of unlike speed."""

    def __init__(self, seconds_per_sample: float) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.last = nn.Linear(12, 16).double(), nn.Linear(16, 12).double()
        self.head = nn.Linear(12, 5).double()
        self.seconds = seconds_per_sample

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(self.seconds * len(x))
        return self.head(self.last(torch.tanh(self.first(x))))


def tensor_parallel(rank: int) -> dict[str, Any]:
    """Return, of two data-parallel by two tensor-parallel ranks, what each saw and learnt."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = SlowNet(0.001 if rank < 2 else 0.02)  # far more than a busy machine adds
    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.children():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    x, y = samples(torch.float64).tensors
    data = TensorDataset(x, y, torch.arange(len(x)))
    # Unlike generators: each tensor-parallel rank would draw an order of its own.
    order = torch.Generator().manual_seed(rank)
    seen, sizes, errors, events = [], [], [], []
    group = mesh["dp"].get_group()
    runtime = Runtime(line_every=None, hooks=(events.append,), process_group=group)
    with Balancer(runtime=runtime) as balancer:
        stock = DataLoader(data, batch_size=6, shuffle=True, generator=order)
        model, loader = balancer.prepare(model, stock)
        for _ in range(2):
            for step in loader.steps():
                mine = []
                for part, classes, numbers in step:
                    mine += numbers.tolist()
                    functional.cross_entropy(model(part), classes).backward()
                seen.append(mine)
                sizes.append(balancer.batch_sizes)
                everybody: list[Any] = [None, None]
                dist.all_gather_object(everybody, mine, group=group)
                numbers = torch.tensor([number for one in everybody for number in one])
                alone = SlowNet(0.0)
                functional.cross_entropy(alone(x[numbers]), y[numbers]).backward()
                errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
                model.zero_grad()
    return {"seen": seen, "sizes": sizes, "error": max(errors), "events": len(events)}


def without_data_parallel_group() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = network(torch.float64)
    parallelize_module(model, mesh["tp"], {"hidden": ColwiseParallel()})
    Balancer(runtime=QUIET).prepare(model, stock())


MISTAKES["without data parallel group"] = (
    without_data_parallel_group,
    "Net with parameters on a device mesh, and not by FSDP2. Call `fully_shard(model, mesh=",
)


def lost(rank: int, steps: bool, sent: signal.Signals, folder: str) -> str:
    """Return what the others are told when rank 1 is killed or stopped in the middle of a step."""
    logging.getLogger("evenstep").addHandler(logging.FileHandler(f"{folder}/{rank}.log"))
    runtime = Runtime(line_every=None, deadline_s=1.5, heartbeat_s=0.2)
    model = slow_model(rank)
    calls: list[int] = []

    def fail(layer: nn.Module, inputs: Any) -> None:
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), sent)

    if rank == 1:
        model[2].register_forward_pre_hook(fail)
    try:
        with Balancer(policy=Fixed((20, 20)), runtime=runtime) as balancer:
            model, loader = balancer.prepare(model, slow_stock(8))
            for step in loader.steps() if steps else ([batch] for batch in loader):
                for (x,) in step:
                    model(x).square().mean().backward()
    except WorkerLostError as error:
        return f"{error.rank}: {error}"
    return "nothing happened"
