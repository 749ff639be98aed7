"""One rank of the loader benchmark: stock and balanced epochs in turn, computing by sleeping."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from evenstep._diagnosis import Phase
from evenstep._planner import Plan
from evenstep._types import IntArray
from evenstep.torch._data._protocols import MicroBatch, StepStart
from evenstep.torch._data.deal._plans import PlanBook, StepSpan
from evenstep.torch._data.loaders._balanced import BalancedLoader
from evenstep.torch._data.loaders._base import StepContext


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared."""

    global_batch_size: int = 64
    smallest: int = 16
    num_workers: int = 4
    prefetch_factor: int = 4
    item_s: float = 0.005
    compute_s: float = 0.1
    steps: int = 30
    rounds: int = 4


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank saw.

    Attributes:
        stock_s, balanced_s: step times, all rounds.
        waited_s: time between the balanced loop's coming back and its batch, per step.
        indices: what the balanced loader handed out, per epoch.
        sizes_differ: steps whose batch was not as large as the newest plan says.
        requested, used: samples asked for, and handed out.
        changed_hands: (step, slot) pairs that this rank owned while it could fetch them, and no
            longer when the step came.
    """

    stock_s: list[float]
    balanced_s: list[float]
    waited_s: list[float]
    indices: list[list[int]]
    sizes_differ: int
    requested: int
    used: int
    changed_hands: int


class Items(Dataset[tuple[torch.Tensor, int]]):
    """Small samples that each take a while."""

    def __init__(self, length: int, item_s: float) -> None:
        self._length = length
        self._item_s = item_s

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self._item_s)
        return torch.full((256,), float(index)), index


class RandomPlans:
    """Other sizes at every step, the same on all ranks, known at the plan point and not before."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._rng = np.random.default_rng(0)
        self._plans: list[Plan] = []
        self._listeners: list[Callable[[Plan], None]] = []

    def at(self, step: int) -> Plan:
        """Make up the plan of ``step``, and those before it."""
        smallest, total = self._setting.smallest, self._setting.global_batch_size
        while len(self._plans) <= step:
            size = int(self._rng.integers(smallest, total - smallest, endpoint=True))
            plan = Plan(len(self._plans), len(self._plans), (size, total - size))
            self._plans.append(plan)
            for listener in self._listeners:
                listener(plan)
        return self._plans[step]

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Tell ``listener`` of every plan."""
        self._listeners.append(listener)


class Session:
    """Takes note of what was handed out under the plans; there is no model to weight.

    Args:
        plans: where plans come from.
    """

    def __init__(self, plans: RandomPlans) -> None:
        self.at, self.subscribe = plans.at, plans.subscribe
        self.steps = self
        self.num_samples: list[int] = []
        self.data_s: list[float] = []

    def begin_step(self, start: StepStart) -> None:
        """Take note."""
        self.num_samples.append(start.num_samples)
        self.data_s.append(start.data_s)

    def begin_epoch(self, *, cuts: bool) -> Session:
        """Return itself: there is nothing to open."""
        return self

    def timed(self, phase: Phase) -> AbstractContextManager[None]:
        """Return a context without a meaning: no step is accounted for."""
        return nullcontext()

    def begin_forward(self, step: int, part: MicroBatch, *, is_last: bool) -> None:
        """Do nothing: there is nothing to weight."""

    def came_to_end(self) -> None:
        """Do nothing: nothing can be missing."""

    def end_epoch(self) -> None:
        """Do nothing: there is nothing to close."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The two ranks, as one of them reaches the other."""

    rank: int
    world_size: int = 2

    def check(self) -> None:
        """Do nothing: none is lost."""

    def share(self, key: tuple[int, int], values: IntArray | None) -> IntArray:
        """Return rank 0's integers."""
        box: list[Any] = [values]
        dist.broadcast_object_list(box, src=0)
        return np.array(box[0])


def run_rank(rank: int, setting: Setting) -> Measured:
    """Run every round, stock and balanced in turn, and return what this rank saw."""
    warnings.filterwarnings("ignore", "This DataLoader will create")
    size = setting.global_batch_size
    data = Items(setting.steps * size, setting.item_s)
    shared = {
        "batch_size": size // 2,
        "num_workers": setting.num_workers,
        "prefetch_factor": setting.prefetch_factor,
        "persistent_workers": True,
        "multiprocessing_context": "fork",  # as in a training script; here it is another one
    }
    stock = DataLoader(data, sampler=DistributedSampler(data), **shared)
    plans = RandomPlans(setting)
    session = Session(plans)
    balanced = BalancedLoader(
        DataLoader(data, shuffle=True, **shared),
        StepContext(ranks=Ranks(rank), session=session, global_batch_size=size),
    )
    stock_s: list[float] = []
    balanced_s: list[float] = []
    indices: list[list[int]] = []
    for _ in range(setting.rounds):
        stock_s += _epoch(stock, setting, [])
        indices.append([])
        balanced_s += _epoch(balanced, setting, indices[-1])
    balanced.close()
    counts = balanced.fetch_counts
    return Measured(
        stock_s,
        balanced_s,
        session.data_s,
        indices,
        sum(plans.at(k).batch_size[rank] != n for k, n in enumerate(session.num_samples)),
        counts.requested,
        counts.used,
        _changed_hands(rank, setting),
    )


def _epoch(loader: Iterable[Any], setting: Setting, indices: list[int]) -> list[float]:
    """Train for an epoch in lockstep with the other rank and return the step times."""
    dist.barrier()
    marks = []
    for _, index in loader:
        indices += index.tolist()
        time.sleep(setting.compute_s)
        dist.all_reduce(torch.zeros(1))
        marks.append(time.perf_counter())
    return np.diff(marks).tolist()


def _changed_hands(rank: int, setting: Setting) -> int:
    """Replay all plans, and count what was this rank's within the horizon but not in the end."""
    plans = RandomPlans(setting)
    book = PlanBook(rank, setting.global_batch_size)
    owned = []
    num_steps = setting.steps * setting.rounds
    for step in range(num_steps):
        book.apply(plans.at(step), step)
        share = book.share(StepSpan(step, 0, setting.global_batch_size))
        assert share is not None
        owned.append(set(share.slots.tolist()))
    horizon = setting.num_workers * setting.prefetch_factor
    changed = 0
    for step in range(num_steps):
        epoch = step // setting.steps * setting.steps
        # The plan before the epoch is in force until its first plan point.
        ahead = owned[max(epoch - 1, step - horizon, 0) : step]
        changed += len(set().union(*ahead) - owned[step])
    return changed
