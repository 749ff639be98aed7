"""What fails inside evenstep, and is not needed for the gradient, costs the balancing alone."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from evenstep import AffineTime, Decision
from evenstep.events import BalancingStopped, Event, PolicyFailed
from evenstep.policies import AbstractPolicy, LbBsp2018
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

from .exactness import BATCH_SIZE, CASES, flat_gradient, order, reference, samples
from .models import mean_loss

pytestmark = pytest.mark.cluster

FAILS_AT = 3
UNEQUAL = (11, 5)


class Switch:
    """Set in a step, whatever process it is in."""

    def __init__(self) -> None:
        self.on = False


@final
@dataclass(frozen=True)
class Mine(AbstractPolicy[None]):
    """A user's policy, which keeps its sizes and then divides by zero."""

    switch: Switch
    name = "mine"

    def init(self, cluster: Any) -> Any:
        return Decision(np.array(UNEQUAL), None, "as given")

    def update(self, cluster: Any, timings: Any, state: Any) -> Any:
        return self.init(cluster) if not self.switch.on else 1 // 0


class Reader:
    """A user's reader of memory, by NumPy, that breaks."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def capacity_bytes(self) -> int:
        return 10**12

    def peak_bytes(self) -> int:
        if self.switch.on:
            raise OSError("no such counter")
        return np.int64(10**6)

    def reset(self) -> None:
        pass


def train(rank: int, what: str) -> dict[str, Any]:
    """Return the sizes of every step, how far gradients are from one process', and what is told."""
    switch, told, logged = Switch(), [], []
    runtime = {"hooks": (told.append,), "line_every": None}
    policy = LbBsp2018(profile=AffineTime(np.zeros(2), 1 / np.array(UNEQUAL)))
    if what == "policy":
        policy = Mine(switch)
    elif what == "reader" and rank == 1:
        runtime["memory"] = Reader(switch)
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(handler.format(record))
    logging.getLogger("evenstep").addHandler(handler)
    torch.manual_seed(0)
    model = DistributedDataParallel(CASES["mlp"].model().double())
    stock = DataLoader(samples(), batch_size=BATCH_SIZE, shuffle=True, generator=order())
    sizes, gradients = [], []
    with Balancer(policy=policy, runtime=Runtime(**runtime)) as balancer:
        model, loader = balancer.prepare(model, stock)
        for step, (x, y) in enumerate(loader):
            sizes.append((len(x), balancer.batch_sizes))
            if step == FAILS_AT:
                switch.on = True
                if what == "planner" and rank == 0:  # a mistake in what evenstep brings along
                    object.__setattr__(policy, "profile", "lost")
            model.zero_grad()
            mean_loss(model, x, y, decay=1e-3).backward()
            gradients.append(flat_gradient(model))
        learnt = json.loads(balancer.state_dict().get("estimates", "{}")).get("learnt")
    apart = [
        float((mine - plain).norm() / plain.norm())
        for mine, plain in zip(gradients, reference(CASES["mlp"], world_size=2), strict=True)
    ]
    return {
        "sizes": sizes,
        "error": max(apart),
        "events": _of_faults(told),
        "measured": [event.step for event in told if type(event).__name__ == "StepMeasured"],
        "logged": logged,
        "learnt": learnt is not None,
    }


def _of_faults(events: list[Event]) -> list[Event]:
    return [e for e in events if type(e).__name__ in ("PolicyFailed", "BalancingStopped")]


NUM_FULL = 6  # and a short step after them


def sizes_of(results):
    """Return the sizes that all ranks had in the full steps, which they computed."""
    assert [sizes for _, sizes in results[0]["sizes"]] == [s for _, s in results[1]["sizes"]]
    for rank, result in enumerate(results):
        full = result["sizes"][:NUM_FULL]
        assert [num for num, _ in full] == [sizes[rank] for _, sizes in full]
    return [sizes for _, sizes in results[0]["sizes"][:NUM_FULL]]


@pytest.mark.parametrize(
    ("what", "rank", "problem"),
    [
        ("planner", 0, "internal fault of evenstep (AttributeError"),
        ("reader", 1, "Reader failed (OSError: no such counter)"),
    ],
)
def test_all_ranks_go_on_with_equal_sizes_from_the_same_step(what, rank, problem):
    """The gradient stays that of one process; it is said once, and who is to blame."""
    results = run_workers(2, train, what, allow_faults=True)

    assert sizes_of(results) == [UNEQUAL] * (FAILS_AT + 1) + [(8, 8)] * 2
    assert [result["error"] <= 1e-12 for result in results] == [True, True]
    (stopped,) = results[0]["events"]
    assert isinstance(stopped, BalancingStopped)
    assert (stopped.step, stopped.rank) == (FAILS_AT, rank)
    assert stopped.problem.startswith(problem)
    assert not results[0]["learnt"]
    logged = results[rank]["logged"]
    assert len(logged) == 1
    assert problem in logged[0]
    assert "Traceback" in logged[0]
    assert ("Please report it" in logged[0]) == (what == "planner")
    assert results[0]["measured"][-1] == NUM_FULL


def test_a_policy_of_the_users_own_is_named_and_the_plan_stays():
    """Its mistake is none of evenstep's: it is asked again at the next step."""
    results = run_workers(2, train, "policy")

    assert sizes_of(results) == [UNEQUAL] * NUM_FULL
    assert [result["error"] <= 1e-12 for result in results] == [True, True]
    failed = results[0]["events"]
    assert [type(event) for event in failed] == [PolicyFailed] * 3
    assert {(event.policy, event.problem) for event in failed} == {
        ("Mine", "ZeroDivisionError: integer division or modulo by zero")
    }
    assert results[0]["learnt"]
    (logged,) = results[0]["logged"]
    assert "the policy Mine failed" in logged
