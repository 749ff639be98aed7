"""A loss that is not what the balancer was told ends the run on all ranks; others never do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep import Cluster, Decision, StepTimings
from evenstep.policies import AbstractPolicy
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

from .._tiers import Groups, slow_but

pytestmark = pytest.mark.cluster

STEPS, GLOBAL = 40, 64
_SIZES = ((44, 20), (22, 42), (40, 24))


@final
@dataclass(frozen=True, slots=True)
class Late(AbstractPolicy[int]):
    """Equal sizes for three steps, then others in turn."""

    name = "late"

    def init(self, cluster: Cluster) -> Decision[int]:
        return Decision(np.array([GLOBAL // 2] * 2), 0, reason="equal")

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        sizes = (GLOBAL // 2,) * 2 if state < 2 else _SIZES[state % 3]
        return Decision(np.array(sizes), state + 1, reason="in turn")


class Returning(nn.Module):
    """A model that returns its loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 5)
        self.reduction = reduction

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.inner(x), y, reduction=self.reduction)


class Detector(nn.Module):
    """Classes and boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.boxes = nn.Linear(8, 5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"classes": self.classes(x), "boxes": self.boxes(x)}


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor, Balancer], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A loss, and what the balancer is told of it."""

    loss: Loss
    told: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = lambda: nn.Linear(8, 5)
    weighting: str = "output"
    sharded: bool = False
    micro: bool = False


def _of_logits(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    return lambda model, x, y, balancer: loss(model(x), y)


def _over_all_ranks(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, balancer: Balancer
) -> torch.Tensor:
    """The recommended form for tokens: divided by the count of all ranks."""
    count = (y != -100).sum()
    dist.all_reduce(count)
    return functional.cross_entropy(model(x), y, reduction="sum") * 2 / count


def _boxes_over_all_ranks(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, balancer: Balancer
) -> torch.Tensor:
    found = model(x)
    classes = functional.cross_entropy(found["classes"], y)
    return classes + (found["boxes"] - 1).abs().sum() * 2 / GLOBAL


def _weighted_means(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, balancer: Balancer
) -> torch.Tensor:
    found = model(x)
    classes = balancer.weight(functional.cross_entropy(found["classes"], y))
    return classes + (found["boxes"] - 1).abs().sum() * 2 / GLOBAL


def _attacked(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, balancer: Balancer
) -> torch.Tensor:
    """A mean over samples, which a sum over them has moved."""
    given = x.clone().requires_grad_()
    total = functional.cross_entropy(model(given), y, reduction="sum")
    (slope,) = torch.autograd.grad(total, given)
    return functional.cross_entropy(model(x + slope.sign() / 10), y)


def _ctc(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    steps = logits.log_softmax(-1).expand(6, *logits.shape)
    full, ones = torch.full((len(y),), 6), torch.ones(len(y), dtype=torch.long)
    return functional.ctc_loss(steps, y.clamp(min=1)[:, None], full, ones)


def _in_half(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.to(torch.bfloat16), y)


_CE = functional.cross_entropy
_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0])
_SUM = {"loss_reduction": "sum"}
RIGHT = {
    "a mean over samples": Case(_of_logits(_CE)),
    "in half precision": Case(_of_logits(_in_half)),
    "a regression": Case(_of_logits(lambda out, y: functional.mse_loss(out[:, 0], y.float()))),
    "ignored targets": Case(_of_logits(_CE), {"unit": lambda batch: (batch[1] != -100).sum()}),
    "class weights": Case(
        _of_logits(lambda out, y: _CE(out, y, weight=_WEIGHTS)),
        {"unit": lambda batch: _WEIGHTS[batch[1].clamp(min=0)][batch[1] != -100].sum()},
    ),
    "ctc": Case(_of_logits(_ctc)),
    "returned by the model": Case(
        lambda model, x, y, balancer: model(x, y), model=lambda: Returning("mean")
    ),
    "a sum": Case(_of_logits(lambda out, y: _CE(out, y, reduction="sum")), _SUM),
    "divided by the count of all ranks": Case(_over_all_ranks, _SUM),
    "mixed, weighted by hand": Case(_weighted_means, model=Detector, weighting="loss"),
    "an attack by a sum": Case(_attacked),
    "micro-batches": Case(_of_logits(_CE), micro=True),
    "sharded": Case(_of_logits(_CE), sharded=True),
}
WRONG = {
    "a sum": Case(_of_logits(lambda out, y: _CE(out, y, reduction="sum"))),
    "divided by the count of all ranks": Case(_over_all_ranks),
    "divided by a constant": Case(
        _of_logits(lambda out, y: _CE(out, y, reduction="sum") / 32), sharded=True
    ),
    "returned by the model": Case(
        lambda model, x, y, balancer: model(x, y), model=lambda: Returning("sum")
    ),
    "a mean for a sum": Case(_of_logits(_CE), _SUM),
    "mixed": Case(_boxes_over_all_ranks, model=Detector),
    "a sum of micro-batches": Case(
        _of_logits(lambda out, y: _CE(out, y, reduction="sum")), micro=True
    ),
}


def outcomes(rank: int, cases: dict[str, str], checks_loss: bool = True) -> dict[str, str]:
    """Train on each case, of ``RIGHT`` or ``WRONG``; return what ended it, or nothing."""
    known = {"right": RIGHT, "wrong": WRONG}
    return {name: _outcome(known[kind][name], checks_loss) for name, kind in cases.items()}


def _outcome(case: Case, checks_loss: bool) -> str:
    torch.manual_seed(3)
    model = case.model()
    model = fully_shard(model) if case.sharded else DistributedDataParallel(model)
    inputs = torch.randn(STEPS * GLOBAL, 8)
    targets = (inputs @ torch.randn(8, 5)).argmax(1)
    targets[torch.rand(len(targets)) < 0.2] = -100 if "unit" in case.told else 0
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=GLOBAL // 2, shuffle=True)
    runtime = Runtime(line_every=None, checks_loss=checks_loss)
    balancer = Balancer(policy=Late(), runtime=runtime, **case.told)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    try:
        with balancer:
            balanced, batches = balancer.prepare(model, loader, weighting=case.weighting)
            for batch in _micro_batches(batches) if case.micro or case.sharded else batches:
                case.loss(balanced, *batch, balancer).backward()
                optimizer.step()
                optimizer.zero_grad()
    except ValueError as error:
        return str(error)
    return ""


def _micro_batches(loader: Any) -> Iterator[Any]:
    for step in loader.steps():
        yield from step


FIRST = ["a mean over samples", "ignored targets", "a sum", "an attack by a sum"]
REMEDIES = dict.fromkeys(WRONG, 'use `Balancer(loss_reduction="sum")`') | {
    "a mean for a sum": 'Leave `loss_reduction="sum"` out',
    "mixed": "`balancer.weight(means) + sums`",
}


@pytest.fixture(scope="module")
def right():
    """What ended the training of each of two ranks, by the case."""

    def run(cases):
        ranks = run_workers(2, outcomes, dict.fromkeys(cases, "right"))
        return {case: [found[case] for found in ranks] for case in cases}

    return Groups(FIRST, RIGHT, run)


@pytest.mark.parametrize("case", slow_but(FIRST, RIGHT))
def test_a_loss_that_is_as_it_was_said_is_let_be(right, case):
    assert right[case] == ["", ""]


@pytest.mark.parametrize("case", slow_but(["a sum", "a mean for a sum", "mixed"], WRONG))
def test_another_one_ends_all_ranks_with_the_remedy(case):
    """Silent, it would train with a gradient that is up to 70 % off."""
    found = run_workers(2, outcomes, {case: "wrong"}, allow_faults=True)

    for texts in found:
        assert texts[case].startswith("`Balancer(loss_reduction=")
        assert REMEDIES[case] in texts[case]


def test_the_check_can_be_turned_off():
    found = run_workers(2, outcomes, {"a sum": "wrong"}, False)

    assert found == [{"a sum": ""}] * 2
