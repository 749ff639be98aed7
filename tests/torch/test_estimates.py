"""What a balancer's state and the machines say reaches a new run, or is refused."""

from __future__ import annotations

import ast
import io
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep import Decision
from evenstep.events import StepMeasured
from evenstep.policies import AbstractPolicy, Auto, Deadband, Equal
from evenstep.policies._by_name import reads_resources
from evenstep.prediction import AbstractPredictor
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

from .restarts import speeds

NUM_STEPS = 6


@final
@dataclass(frozen=True)
class Curious(AbstractPredictor[Any]):
    """Foresees nothing, and is a reason to ask."""

    reads_resources: ClassVar[bool] = True

    def init(self, world_size):
        return None

    def update(self, state, values, resources=None):
        return None

    def predict(self, state):
        return np.array([])


@final
@dataclass(frozen=True)
class Nosy(AbstractPolicy[Any]):
    """Gives away what it is told of the machines as its reason."""

    predictor: AbstractPredictor[Any] | None
    name: ClassVar[str] = "nosy"

    def init(self, cluster):
        return Decision(np.array([4, 4]), 0, "start")

    def update(self, cluster, timings, state):
        told = timings.resources
        text = None if told is None else (told.free_cpu.tolist(), told.free_memory_bytes.tolist())
        moved = state + 1
        return Decision(np.array([4 - moved % 2, 4 + moved % 2]), moved, repr(text))


class Meter:
    """A machine with more to spare at every look."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_looks = rank, 0

    def read(self) -> tuple[float, int]:
        self.num_looks += 1
        return self.num_looks / 100, 1000 * (self.rank + 1)


def watched(rank: int, curious: bool, given: bool) -> tuple[list[str], int]:
    """Return what the policy was told, plan by plan, and how often the reader was asked."""
    meter, events = Meter(rank), []
    runtime = Runtime(line_every=None, hooks=(events.append,), machine=meter if given else None)
    policy = Nosy(Curious() if curious else None)
    with Balancer(policy=policy, runtime=runtime) as balancer:
        samples = TensorDataset(torch.randn(8 * NUM_STEPS, 4))
        model, loader = balancer.prepare(nn.Linear(4, 4), DataLoader(samples, batch_size=4))
        reasons = []
        for (x,) in loader:
            model(x).mean().backward()
            reasons.append(balancer._session.steps.plan.reason)
    assert rank or any(isinstance(event, StepMeasured) for event in events)
    return reasons, meter.num_looks


def written_and_read(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.cluster
def test_a_restarted_run_begins_with_the_sizes_it_had():
    """Its first step is balanced, where a new run's is not."""
    (state, before, nothing), (elsewhere, _, _) = run_workers(2, speeds, None, 1)
    assert nothing == []
    assert before[0] == (12, 12)
    assert before[-1][1] < 8
    assert elsewhere == {}  # rank 0 plans, and writes checkpoints

    (_, after, (event,)), _ = run_workers(2, speeds, written_and_read(state), 1)
    assert (event.policy, event.known) == ("resumed", (True, True))
    assert after[0] == event.batch_size
    assert after[0][1] < 8

    unused = Balancer()  # a run that is stopped before it has begun forgets nothing
    unused.load_state_dict(state)
    assert unused.state_dict() == state


def test_before_a_run_there_is_nothing_to_know():
    """A state of nothing loads, and changes nothing."""
    state = written_and_read(Balancer().state_dict())
    balancer = Balancer()
    balancer.load_state_dict(state)

    assert balancer.state_dict() == state


@pytest.mark.parametrize(
    "state",
    [
        *(None, [], {}, {"format": "x"}, {"format": "evenstep-balancer-1"}),
        *({"estimates": 3}, {"estimates": "{"}, {"estimates": "[]"}),
    ],
)
def test_something_else_is_refused(state):
    """With what to do instead."""
    with pytest.raises(ValueError, match=r"Balancer.load_state_dict.*measured again within"):
        Balancer().load_state_dict(state)


def test_a_run_under_way_takes_no_state():
    """It would come too late."""
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    with Balancer() as balancer:
        loader = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4)
        model, loader = balancer.prepare(nn.Linear(2, 1), loader)
        for (x,) in loader:
            model(x).mean().backward()
        with pytest.raises(ValueError, match="come before the first loop"):
            balancer.load_state_dict(Balancer().state_dict())


@pytest.mark.cluster
def test_every_workers_machine_is_told_with_its_step():
    """Rank 0's policy sees both machines, as they were at the end of each step."""
    (reasons, num_looks), (_, theirs) = run_workers(2, watched, True, True)
    told = [ast.literal_eval(reason) for reason in reasons if reason != "start"]

    assert num_looks == theirs == NUM_STEPS
    # The first step warms up and is not shown, so the policy begins with the second look.
    assert told == [([n / 100] * 2, [1000, 2000]) for n in range(2, NUM_STEPS)]


@pytest.mark.cluster
def test_nobody_looks_for_a_policy_that_does_not_ask():
    """It would cost a tenth of a millisecond a step."""
    for reasons, num_looks in run_workers(2, watched, False, True):
        assert set(reasons) == {"start", "None"}
        assert num_looks == 0


@pytest.mark.cluster
def test_this_process_is_read_by_default():
    """A share of the CPUs and some bytes, from a live machine."""
    (reasons, _), _ = run_workers(2, watched, True, False)

    for reason in reasons[2:]:
        free_cpu, free_memory = ast.literal_eval(reason)
        assert all(0 <= share <= 1 for share in free_cpu)
        assert all(size > 2**20 for size in free_memory)


def test_who_asks_is_found_at_any_depth():
    """In a wrapped policy too."""
    assert reads_resources(Deadband(Nosy(Curious()), 0.1))
    assert not any(map(reads_resources, (Auto(), Equal(), Deadband(Nosy(None), 0.1))))
