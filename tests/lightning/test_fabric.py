"""Lightning's Fabric: two lines more, no second DDP, and every epoch its own order."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

from .._tiers import slow_but
from ..torch.models import Mlp
from ..torch.plans import Restless

pytestmark = pytest.mark.cluster

QUIET = Runtime(line_every=None)
NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 50, 6, 3


class Backwards(Sampler):
    """An order of the user's own, which is another one in every epoch."""

    epoch = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        yield from ((7 * self.epoch - place) % NUM_SAMPLES for place in range(NUM_SAMPLES))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(5, (NUM_SAMPLES,), generator=generator))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().double()


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def reference(orders: list[list[int]], size: int) -> torch.Tensor:
    """Return where one process ends that is given global batches in these orders."""
    model, data = mlp(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for order in orders:
        for first in range(0, NUM_SAMPLES, size):
            x, y = data[order[first : first + size]]
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return parameters(model)


def orders_of(sampler: str) -> list[list[int]]:
    """Return the orders of all epochs as Fabric has them: it tells samplers the epoch."""
    if sampler == "own":
        own = Backwards()
        orders = []
        for epoch in range(NUM_EPOCHS):
            own.set_epoch(epoch)
            orders.append(list(own))
        return orders
    return [
        torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        for epoch in range(NUM_EPOCHS)
    ]


def loader_of(sampler: str) -> DataLoader:
    if sampler == "own":
        return DataLoader(samples(), BATCH_SIZE, sampler=Backwards())
    return DataLoader(samples(), BATCH_SIZE, shuffle=True)


def with_fabric(rank: int, world_size: int, sampler: str, loop: str) -> dict[str, Any]:
    """Run Fabric's own example with two lines more; return its error, and what it was given."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader_of(sampler))
    sizes = set()
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        model, loader = balancer.prepare(model, loader)
        for _ in range(NUM_EPOCHS):
            for step in loader.steps() if loop == "steps" else ([batch] for batch in loader):
                for x, y in step:
                    loss = functional.cross_entropy(model(x), y)
                    fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                sizes.add(balancer.batch_sizes)
    alone = reference(orders_of(sampler), BATCH_SIZE * world_size)
    return {"kind": type(model).__name__, "error": relative(model, alone), "sizes": sizes}


def relative(model: nn.Module, alone: torch.Tensor) -> float:
    return float((parameters(model) - alone).norm() / alone.norm())


class Shell(nn.Module):
    """What Fabric puts around a model, as far as evenstep looks at it."""

    def __init__(self, forward_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module

    def forward(self, *inputs: Any) -> Any:
        return self._forward_module(*inputs)


class LoaderShell:
    """What Fabric puts around a loader, likewise."""

    def __init__(self, loader: DataLoader, device: torch.device | None = None) -> None:
        self._dataloader = loader
        self._device = device
        self._num_iter_calls = 0


def sharded(**options: Any) -> LoaderShell:
    """Return a loader as Fabric's ``setup_dataloaders`` does."""
    data = samples()
    return LoaderShell(DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data)), **options)


def interrupted(rank: int) -> dict[str, Any]:
    """Train over wrappers, stop in the second epoch, and go on in another run from the state."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stops, state = [(1, 2), (NUM_EPOCHS, None)], None
    ddp = DistributedDataParallel(model)
    for last_epoch, last_step in stops:
        shell = Shell(ddp)
        with Balancer(policy=Restless(), runtime=QUIET) as balancer:
            prepared, loader = balancer.prepare(shell, sharded(device=torch.device("cpu")))
            assert prepared is shell
            if state is not None:
                loader.load_state_dict(state)
            for epoch in range(0 if state is None else 1, NUM_EPOCHS):
                for number, (x, y) in enumerate(loader):
                    functional.cross_entropy(prepared(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if (epoch, number) == (last_epoch, last_step):
                        state = loader.state_dict()
                        break
                if epoch == last_epoch:
                    break
    return {"error": relative(model, reference(orders_of("shuffle"), 2 * BATCH_SIZE))}


def steps_and_means(rank: int) -> dict[str, Any]:
    """Return what a loop over steps and an evaluation are given on another device."""
    meta = torch.device("meta")
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        shell = Shell(DistributedDataParallel(mlp()))
        model, loader = balancer.prepare(shell, sharded(device=meta))
        devices = set()
        for step in loader.steps():
            for x, y in step:
                devices |= {x.device.type, y.device.type}
                model(torch.zeros(len(x), 6, dtype=torch.float64)).mean().backward()
            assert step.num_samples == balancer.num_samples
        evaluation = balancer.prepare_eval(sharded(device=meta))
        for x, _ in evaluation:
            devices.add(x.device.type)
            evaluation.add("count", 1.0)
        return {"devices": devices, "mean": evaluation.mean(), "length": len(loader)}


class Around(nn.Module):
    """A model of the user's with a DDP inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DistributedDataParallel(mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


MISTAKES = {
    "a DDP inside": (Around, "at `net`. Prepare that one: `balancer.prepare(model.net, loader)`."),
    "a DDP in a DDP": (lambda: DistributedDataParallel(Around()), "with a DDP at `module.net`."),
    "a wrapper around no DDP": (lambda: Shell(mlp()), 'Use `Fabric(strategy="ddp", devices=...)`'),
}


def mistakes(rank: int) -> dict[str, str]:
    """Return the error's text of every mistake."""
    texts = {}
    for name, (make, _) in MISTAKES.items():
        try:
            Balancer(runtime=QUIET).prepare(make(), sharded())
        except ValueError as error:
            texts[name] = str(error)
    return texts


NEEDS_LIGHTNING = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")


@NEEDS_LIGHTNING
@pytest.mark.parametrize(
    ("world_size", "sampler", "loop"),
    slow_but(
        [(2, "own", "steps")],
        [(2, "shuffle", "plain"), (3, "own", "plain"), (2, "own", "steps")],
    ),
)
def test_fabrics_own_example_ends_where_one_process_ends(world_size, sampler, loop):
    """After three epochs under plans that change at every step; the model stays Fabric's."""
    for found in run_workers(world_size, with_fabric, world_size, sampler, loop):
        assert found["error"] <= 1e-12
        assert found["kind"] == "_FabricModule"
        assert len(found["sizes"]) > 3


def test_a_wrapped_loader_goes_on_where_it_was():
    """Within an epoch; and the epochs after it have the orders that they would have had."""
    for found in run_workers(2, interrupted):
        assert found["error"] <= 1e-12


def test_batches_go_to_the_wrappers_device():
    """In steps and in an evaluation too, which keep what they can do."""
    found = run_workers(2, steps_and_means)[0]

    assert found == {"devices": {"meta"}, "mean": {"count": 1.0}, "length": 5}


@pytest.fixture(scope="module")
def refused():
    """Error texts by mistake, on both ranks."""
    return run_workers(2, mistakes)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_would_average_gradients_twice_or_never_is_refused(refused, mistake):
    """On every rank, with the remedy."""
    for texts in refused:
        assert MISTAKES[mistake][1] in texts[mistake]
