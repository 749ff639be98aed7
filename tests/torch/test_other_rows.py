"""Rows of no batch are warned of, with both remedies; a batch in another form is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._patterns._models import net
from evenstep.exceptions import EvenstepWarning
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

from .pattern_runs import SIZES, Turning

pytestmark = pytest.mark.cluster

GLOBAL = sum(SIZES[2][0])
NUM_STEPS = 9
WORDS = "neither that batch nor views of it"


class Step(NamedTuple):
    """What a loop has in one step: a batch, its fellow of the step before, and stored rows."""

    model: Callable[..., torch.Tensor]
    x: torch.Tensor
    y: torch.Tensor
    before: tuple[torch.Tensor, torch.Tensor]
    stored: tuple[torch.Tensor, torch.Tensor]

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.model(x), y)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return (x - 0.1) / 1.5


def memory_beside_the_batch(step: Step) -> torch.Tensor:
    """Rows of the batch and of a memory in one tensor, after a transform."""
    x = normalised(torch.cat([step.x, step.stored[0]]))
    return step.loss(x, torch.cat([step.y, step.stored[1]]))


def memory_alone(step: Step) -> torch.Tensor:
    """The loader only fills a memory."""
    return step.loss(step.stored[0] + torch.rand(()), step.stored[1])


def same_rows(step: Step) -> torch.Tensor:
    """The same stored rows in every step."""
    return step.loss(step.x, step.y) + step.loss(*step.stored)


def old_batch(step: Step) -> torch.Tensor:
    """A clone of the batch before, with a loss of its own."""
    return step.loss(step.x, step.y) + step.loss(*step.before)


def twice_as_many(step: Step) -> torch.Tensor:
    """As many replayed rows as are twice an equal batch."""
    rows = torch.randn(GLOBAL // 2 * 2, 4).double()
    return step.loss(step.x, step.y) + step.model(rows).abs().mean()


def half_as_many(step: Step) -> torch.Tensor:
    """As many replayed rows as are half an equal batch."""
    rows = torch.randn(GLOBAL // 4, 4).double()
    return step.loss(step.x, step.y) + step.model(rows).abs().mean()


def hardest(step: Step) -> torch.Tensor:
    """The three hardest rows only."""
    with torch.no_grad():
        errors = (step.model(step.x) - step.y).square().sum(1)
    hard = errors.topk(3).indices
    return step.loss(step.x[hard], step.y[hard])


def fixmatch(step: Step) -> torch.Tensor:
    """Labelled rows, and two views of unlabelled ones, normalised on the device."""
    other = step.stored[0]
    out = step.model(normalised(torch.cat([step.x, other, other + 0.1])))
    return functional.mse_loss(out[: len(step.x)], step.y) + out[len(step.x) :].abs().mean()


def constant(step: Step) -> torch.Tensor:
    """A rank's own constant beside the batch."""
    return step.loss(step.x, step.y) + step.model(torch.ones(5, 4).double()).square().mean()


def moved(step: Step) -> torch.Tensor:
    """A copy that is normalised, as on a device."""
    return step.loss(normalised(step.x.clone()), step.y)


def augmented(step: Step) -> torch.Tensor:
    """Another draw for each row."""
    return step.loss(step.x + torch.rand_like(step.x), step.y)


def two_views(step: Step) -> torch.Tensor:
    """Two views in one tensor, and ten small crops in another."""
    first, second = step.model(torch.cat([step.x + 0.1, step.x - 0.1])).chunk(2)
    crops = step.model(torch.cat([step.x * 0.5] * 10))
    return functional.mse_loss(first, second) + crops.abs().mean()


def parts(step: Step) -> torch.Tensor:
    """Parts of a copy, each times its share."""
    x = normalised(step.x)
    pairs = zip(x.split(3), step.y.split(3), strict=True)
    return sum(step.loss(part, y) * (len(part) / len(x)) for part, y in pairs)


def looked_at(step: Step) -> torch.Tensor:
    """Rows of no batch that have no backward."""
    step.model(step.stored[0])
    return step.loss(step.x, step.y)


STRANGE = {
    loop.__name__: loop
    for loop in (
        memory_beside_the_batch,
        memory_alone,
        same_rows,
        old_batch,
        twice_as_many,
        half_as_many,
        hardest,
        fixmatch,
        constant,
    )
}
ITS_OWN = {loop.__name__: loop for loop in (moved, augmented, two_views, parts, looked_at)}


def warned_of(loop: Callable[[Step], torch.Tensor], *, policy: Any) -> list[str]:
    """Return what is said of a loop's rows on this rank."""
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(NUM_STEPS * GLOBAL, n, generator=draw).double() for n in (4, 2))
    stored = torch.randn(7, 4).double(), torch.randn(7, 2).double()
    loader = DataLoader(TensorDataset(x, y), batch_size=-(-GLOBAL // 2))
    with (
        Balancer(GLOBAL, policy=policy, runtime=Runtime(line_every=None)) as balancer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model, loader = balancer.prepare(DistributedDataParallel(net()), loader)
        before = stored
        for x, y in loader:
            loop(Step(model, x, y, before, stored)).backward()
            before = x.clone(), y.clone()
    said = [str(one.message) for one in caught if one.category is EvenstepWarning]
    return [text for text in said if WORDS in text]


def warnings_of_rows(rank: int) -> dict[str, int]:
    """Return how often the rows of each loop are warned of, under sizes that change and equal."""
    loops = STRANGE | ITS_OWN
    said = {name: len(warned_of(loop, policy=Turning())) for name, loop in loops.items()}
    return said | {"equal": len(warned_of(old_batch, policy="equal"))}


def error_with_weighted_losses(rank: int) -> float:
    """Return the gradient's error where the batch's own loss is weighted, and no other."""
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randn(GLOBAL, n, generator=draw).double() for n in (4, 2))
    memories = [(torch.randn(7, 4).double() + n, torch.randn(7, 2).double()) for n in range(2)]
    theirs = net()
    loss = functional.mse_loss(theirs(x), y)
    (loss + sum(functional.mse_loss(theirs(a), b) for a, b in memories) / 2).backward()
    ours = DistributedDataParallel(net())
    loader = DataLoader(TensorDataset(x, y), batch_size=-(-GLOBAL // 2))
    with Balancer(GLOBAL, policy=Turning(), runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(ours, loader, weighting="loss")
        for x, y in loader:
            a, b = memories[rank]
            with balancer.step((x, y)):
                out = model(torch.cat([x, a]))
            loss = balancer.weight(functional.mse_loss(out[: len(x)], y))
            (loss + functional.mse_loss(out[len(x) :], b)).backward()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs)


@pytest.fixture(scope="module")
def said():
    """How often each loop is warned of, on both ranks."""
    return run_workers(2, warnings_of_rows)


@pytest.mark.parametrize("loop", STRANGE)
def test_rows_of_no_batch_are_warned_of_once(said, loop):
    """They get the weight of the batch in use, which is wrong for rows with a loss of their own."""
    assert [counts[loop] for counts in said] == [1, 1]


@pytest.mark.parametrize("loop", [*ITS_OWN, "equal"])
def test_what_is_the_batch_is_not_warned_of(said, loop):
    """As its number of rows tells; and where sizes are equal, the weight is 1."""
    assert [counts[loop] for counts in said] == [0, 0]


def test_the_batchs_own_loss_weighted_by_hand_is_exact_beside_rows_of_a_memory():
    """1e-12 against one process: the remedy that the warning names."""
    assert max(run_workers(2, error_with_weighted_losses)) <= 1e-12
