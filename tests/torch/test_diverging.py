"""A rank that goes another way than the others ends the run on all of them, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from evenstep.policies import Fixed
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

from .loops import gradient, model, stock

pytestmark = pytest.mark.cluster

ODD = 1  # the rank that goes another way


def train(ddp: nn.Module, x: torch.Tensor) -> None:
    ddp.zero_grad()
    (ddp(x) ** 2).mean().backward()


def skips_a_batch(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """As for a batch that looks bad on one rank."""
    for number, (x, _) in enumerate(loader):
        if not (is_odd and number == 1):
            train(ddp, x)


def skips_the_first(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """Before anything is known of the loop."""
    for number, (x, _) in enumerate(loader):
        if not (is_odd and number == 0):
            train(ddp, x)


def trains_twice(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """As for a batch that is tried again."""
    for number, (x, _) in enumerate(loader):
        train(ddp, x)
        if is_odd and number == 1:
            train(ddp, x)


def uses_another(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """Keeps an old batch where the others take the new one."""
    kept: list[torch.Tensor] = []
    for number, (x, _) in enumerate(loader):
        kept.append(x)
        train(ddp, kept[0] if is_odd and number == 1 else x)


def ends_with_another(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """In the last step of all, after which nothing else comes by."""
    kept: list[torch.Tensor] = []
    for number, (x, _) in enumerate(loader):
        kept.append(x)
        train(ddp, kept[0] if is_odd and number == len(loader) - 1 else x)


def skips_half(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """Trains on a part of its batch."""
    for number, (x, _) in enumerate(loader):
        train(ddp, x[::2] if is_odd and number == 1 else x)


WAYS = {
    way.__name__: way
    for way in (
        skips_a_batch,
        skips_the_first,
        trains_twice,
        uses_another,
        skips_half,
        ends_with_another,
    )
}


def error_of(rank: int, name: str) -> tuple[str, str]:
    """Return the class and the text of what a way ends in."""
    balancer = Balancer(policy=Fixed((14, 6)), runtime=Runtime(line_every=None, deadline_s=6.0))
    ddp, loader = balancer.prepare(DistributedDataParallel(model()), stock(200))
    try:
        with balancer:
            WAYS[name](ddp, loader, is_odd=rank == ODD)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def zeros_for_a_loss(rank: int) -> list[float]:
    """Have no target on one rank in a step, and return every step's distance from one process."""
    errors = []
    with Balancer(policy=Fixed((14, 6)), runtime=Runtime(line_every=None)) as balancer:
        ddp, loader = balancer.prepare(DistributedDataParallel(model()), stock(100))
        for number, (x, numbers) in enumerate(loader):
            is_empty = rank == ODD and number == 2
            ddp.zero_grad()
            loss = (ddp(x) ** 2).mean()
            if is_empty:
                loss = sum(parameter.sum() for parameter in ddp.parameters()) * 0
            loss.backward()
            alone, whole = model(), stock(100).dataset.tensors[0][20 * number : 20 * number + 20]
            rows = (alone(whole) ** 2).mean(1)
            if number == 2:
                seen = torch.zeros(100, dtype=torch.float64)
                seen[numbers] = float(not is_empty)
                torch.distributed.all_reduce(seen)
                rows = rows * seen[40:60]
            rows.mean().backward()
            theirs = gradient(alone)
            errors.append(float((gradient(ddp) - theirs).norm() / theirs.norm()))
    return errors


def more_parts(ddp: nn.Module, x: torch.Tensor) -> None:
    """Backward through parts of two rows, changed so that nothing tells whose they are."""
    for part in x.split(2):
        train(ddp, 1.5 * part)


def last_skipped(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """As for a NaN in the last batch of an epoch."""
    for epoch in range(2):
        for number, (x, _) in enumerate(loader):
            if not (is_odd and epoch == 0 and number == len(loader) - 1):
                train(ddp, x)


def unlike_parts(ddp: nn.Module, loader: Any, *, is_odd: bool) -> None:
    """Each with a backward of its own."""
    for x, _ in loader:
        more_parts(ddp, x)


WAITS = {way.__name__: way for way in (last_skipped, unlike_parts)}


def waited_for(rank: int, name: str) -> tuple[str, str]:
    """Return the class and the text of what a way ends in whose ranks wait for each other."""
    runtime = Runtime(line_every=None, hang_s=600.0, deadline_s=6.0, heartbeat_s=0.3)
    balancer = Balancer(policy=Fixed((14, 6)), runtime=runtime)
    ddp, loader = balancer.prepare(DistributedDataParallel(model()), stock(100))
    try:
        with balancer:
            WAITS[name](ddp, loader, is_odd=rank == ODD)
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def told_by_others(rank: int) -> tuple[str, float]:
    """Fetch one batch ahead, change it in a copy, and end with a step as large on two ranks.

    Returns:
        The error's text, and how far the last gradient is from that of one process.
    """
    runtime = Runtime(line_every=None, deadline_s=6.0)
    with Balancer(policy=Fixed((2, 2, 8)), runtime=runtime) as balancer:
        data = DataLoader(stock(4 * 12 - 1).dataset, batch_size=4)
        ddp, loader = balancer.prepare(DistributedDataParallel(model()), data)
        batches = iter(loader)
        ahead = 2.0 * next(batches)[0]
        while ahead is not None:
            x, following = ahead, next(batches, None)
            ahead = None if following is None else 2.0 * following[0]
            ddp.zero_grad()
            try:
                (ddp(x) ** 2).mean().backward()
            except RuntimeError as error:
                return str(error), 1.0
        alone, whole = model(), 2.0 * data.dataset.tensors[0][36:]
        (alone(whole) ** 2).mean().backward()
        theirs = gradient(alone)
        return "", float((gradient(ddp) - theirs).norm() / theirs.norm())


class TwoHeads(nn.Module):
    """One of whose heads may have no part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]).double()

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        """Return what one head says, or both."""
        first, second = self.heads
        found: torch.Tensor = first(x) + second(x) if both else first(x)
        return found


def with_unused_parameters(rank: int, step: int) -> str:
    """Leave a head out on one rank, in one step, and return the error."""
    runtime = Runtime(line_every=None, hang_s=60.0)
    try:
        with Balancer(policy="equal", runtime=runtime) as balancer:
            heads, loader = balancer.prepare(TwoHeads(), stock())
            for number, (x, _) in enumerate(loader):
                heads(x, both=not (rank == ODD and number == step)).mean().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_reduce_different_batches_end_at_once(way):
    """Not after a silent run on wrong gradients, nor after a wait for hang_s."""
    results = run_workers(2, error_of, way, timeout_s=60.0)

    for kind, text in results:
        assert kind == "RanksDivergedError", text
        assert f"Rank {ODD} reduced gradients of" in text
        assert "To skip a batch, skip it on all" in text


@pytest.mark.parametrize("way", WAITS)
def test_ranks_that_wait_for_each_other_end_long_before_a_slow_one_would(way):
    """One waits for its next batch, the others in a backward: it is named, and not called slow."""
    for kind, text in run_workers(2, waited_for, way, timeout_s=60.0):
        assert kind == "WorkerLostError"
        assert f"Rank {ODD} on" in text
        assert "waits there itself, so it is not slow: ranks made different numbers of" in text


def test_zeros_in_place_of_a_loss_are_exact():
    """On a rank without targets: DDP averages in their backward, though no output is in them."""
    for errors in run_workers(2, zeros_for_a_loss, timeout_s=60.0):
        assert len(errors) == 5
        assert max(errors) <= 1e-12


def test_a_rank_that_cannot_tell_its_batch_is_told_by_the_others():
    """The short last step has as many samples as a full one on two ranks, not on the third."""
    for text, error in run_workers(3, told_by_others, timeout_s=60.0):
        assert not text
        assert error <= 1e-12


@pytest.mark.parametrize("step", [0, 1, 2])
def test_parameters_without_a_part_in_the_loss_are_reported_by_the_rank_that_has_them(step):
    """In DDP's own words; also in the first step and in the last."""
    first, odd = run_workers(2, with_unused_parameters, step, timeout_s=50.0)

    assert "parameters that were not used in producing loss" in odd
    assert first.startswith("WorkerLostError: Rank 1")
