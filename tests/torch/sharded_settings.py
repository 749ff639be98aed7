"""What the workers of the tests of FSDP2's settings run: each setting, in a plain loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import StepMeasured
from evenstep.torch import Balancer, Runtime

from ..network.torch.networks import Turning
from .matrix import whole

WORLD_SIZE, PER_RANK, NUM_STEPS = 4, 6, 5
SIZES = (10, 7, 4, 3)


class Net(nn.Module):
    """Three layers and a head, in double precision.

    Args:
        tied: whether the head has the first layer's weight.
        checkpoints: whether layers run once more in the backward.
    """

    def __init__(self, *, tied: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 8)
        if tied:
            self.head.weight = self.layers[0].weight
        self.checkpoints = checkpoints
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            run = partial(checkpoint, layer, use_reentrant=False) if self.checkpoints else layer
            x = torch.tanh(run(x))
        return self.head(x)


@dataclass(frozen=True)
class Setting:
    """One way to shard.

    Attributes:
        make: returns the model.
        options: of ``fully_shard``, for the layers.
        layers: whether each layer is sharded by itself, and not the root alone.
        replicates: whether pairs of ranks shard, and each shard is held twice.
        freezes: whether the first layer is not trained.
        prefetches: whether each layer has the next one gathered.
        is_async: whether a gather is begun in one place and waited for in another.
        num_parts: batches whose gradients are accumulated before they are reduced.
        compiles: whether each layer is compiled.
        tolerance: of the gradient.
    """

    make: Callable[[], nn.Module] = Net
    options: tuple[tuple[str, Any], ...] = ()
    layers: bool = True
    replicates: bool = False
    freezes: bool = False
    prefetches: bool = False
    is_async: bool = False
    num_parts: int = 1
    compiles: bool = False
    tolerance: float = 1e-12

    def model(self) -> nn.Module:
        """Return it, not sharded."""
        model = self.make()
        if self.freezes:
            model.layers[0].requires_grad_(False)
        return model

    def sharded(self) -> nn.Module:
        """Return it, sharded."""
        options = dict(self.options)
        if self.replicates:
            names = ("replicate", "shard")
            options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = self.model()
        for layer in model.layers if self.layers else ():
            if self.compiles:
                layer.compile()
            fully_shard(layer, **options)
        options.pop("reshard_after_forward", None)
        fully_shard(model, **options)
        if self.prefetches:
            for layer, following in pairwise(model.layers):
                layer.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([layer])
        if self.is_async:
            for layer in [*model.layers, model]:
                layer._set_unshard_async_op(True)
        return model


def options(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


SETTINGS = {
    "as it stands": Setting(),
    "not resharded": Setting(options=options(reshard_after_forward=False)),
    "resharded over two": Setting(options=options(reshard_after_forward=2)),
    "the root alone": Setting(layers=False),
    "replicated": Setting(replicates=True),
    "prefetched": Setting(prefetches=True),
    "gathered asynchronously": Setting(is_async=True),
    "accumulated": Setting(num_parts=2),
    "tied weights": Setting(partial(Net, tied=True), layers=False),
    "a frozen layer": Setting(freezes=True),
    "activations not kept": Setting(partial(Net, checkpoints=True)),
    "offloaded": Setting(options=options(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "reduced in single precision": Setting(
        options=options(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)),
        tolerance=1e-6,
    ),
    "compiled layers": Setting(compiles=True),
}


@dataclass(frozen=True)
class Found:
    """What one rank found in a setting.

    Attributes:
        error: the largest relative one of a gradient.
        sizes: by step.
        times: how many steps have a time of every rank.
    """

    error: float
    sizes: list[tuple[int, ...]]
    times: int


def gradient(model: nn.Module) -> torch.Tensor:
    """Return that of all that is trained, as one vector."""
    return torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.requires_grad])


def every_setting(rank: int) -> dict[str, Found]:
    """Return what became of each setting, in the order of ``SETTINGS``."""
    return {name: trained(setting) for name, setting in SETTINGS.items()}


def after_all(rank: int) -> tuple[bool, bool]:
    """Return whether FSDP2's code is changed while two runs last, and whether it is afterwards.

    The run that began first ends first.
    """
    modules = [module for name, module in sys.modules.items() if "._fully_shard._fsdp_" in name]
    before = [dict(vars(module)) for module in modules]
    runs = [Balancer(runtime=Runtime(line_every=None)) for _ in range(2)]
    for balancer in runs:
        x = torch.zeros(WORLD_SIZE * PER_RANK, 8, dtype=torch.float64)
        stock = DataLoader(TensorDataset(x), batch_size=PER_RANK)
        model, loader = balancer.prepare(Setting().sharded(), stock)
        for (mine,) in loader:
            model(mine).mean().backward()
    during = [dict(vars(module)) for module in modules] != before
    for balancer in runs:
        balancer.close()
    return during, [dict(vars(module)) for module in modules] != before


def trained(setting: Setting) -> Found:
    """Train with sizes that turn after each step, beside one process that has every sample."""
    events: list[object] = []
    drawn = torch.Generator().manual_seed(1)
    num_samples = WORLD_SIZE * PER_RANK * NUM_STEPS * setting.num_parts
    x = torch.randn(num_samples, 8, generator=drawn, dtype=torch.float64)
    rows = iter(x.split(WORLD_SIZE * PER_RANK))
    errors, sizes = [0.0], []
    runtime = Runtime(line_every=None, hooks=(events.append,))
    with Balancer(policy=Turning(SIZES), runtime=runtime) as balancer:
        stock = DataLoader(TensorDataset(x, x), batch_size=PER_RANK)
        model, loader = balancer.prepare(setting.sharded(), stock)
        alone = setting.model()
        for number, (mine, targets) in enumerate(loader):
            is_last = (number + 1) % setting.num_parts == 0
            model.set_requires_gradient_sync(is_last)
            functional.mse_loss(model(mine), targets).backward()
            part = next(rows)
            functional.mse_loss(alone(part), part).backward()
            sizes.append(balancer.batch_sizes)
            if is_last:
                ours, theirs = gradient(model), gradient(alone)
                errors.append(float((ours - theirs).norm() / theirs.norm()))
                model.zero_grad()
                alone.zero_grad()
    times = [event.compute_s for event in events if isinstance(event, StepMeasured)]
    return Found(max(errors), sizes, sum(all(each) for each in times))
