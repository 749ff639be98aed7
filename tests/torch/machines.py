"""Runs whose policy wants to know what the machines have to spare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep import Decision
from evenstep.events import StepMeasured
from evenstep.policies import AbstractPolicy
from evenstep.prediction import AbstractPredictor
from evenstep.torch import Balancer, Runtime

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
