"""Data sets, plans and loops for the tests of the loader: several ranks in one process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from evenstep._planner import Plan
from evenstep.claims import Hybrid
from evenstep.claims._step_claims import Claim, StepClaims
from evenstep.torch._data.loaders._balanced import BalancedLoader
from evenstep.torch._data.loaders._base import StepContext


class Items(Dataset):
    """Samples that say which they are, and which process fetched them."""

    def __init__(self, length: int, *, item_s: float = 0.0):
        self.length = length
        self.item_s = item_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.item_s)
        return index, os.getpid()


class Rich(Dataset):
    """Samples of all that `default_collate` knows."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return {
            "image": torch.full((2, 3), float(index)),
            "array": np.arange(3) + index,
            "label": index,
            "weight": index / 2,
            "text": f"sample {index}",
            "nested": (torch.tensor(index), [np.float32(index), "x" * index]),
            "half": torch.full((1,), index, dtype=torch.bfloat16),
        }


class Workers(Dataset):
    """Samples that tell of the worker they were fetched in."""

    offset = 0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        info = get_worker_info()
        assert info is not None
        same = info.dataset is self
        return info.id, info.num_workers, info.seed, int(torch.initial_seed()), self.offset, same


class Failing(Items):
    """One sample cannot be had."""

    def __getitem__(self, index):
        if index == 9:
            raise KeyError(f"no sample\nnumber {index}")
        return super().__getitem__(index)


class Batched(Items):
    """Fetches several samples in one go."""

    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, indices):
        return [(index, len(indices)) for index in indices]


class FixedPlan:
    """The same plan for ever."""

    def __init__(self, *batch_size, tail=None, max_forward=None):
        self.plan = Plan(0, 0, batch_size, tail, max_forward)

    def at(self, step: int) -> Plan:
        return self.plan

    def subscribe(self, listener: Callable[[Plan], None]) -> None: ...


class RandomPlans:
    """Other sizes at every step, announced from another thread just before the plan point."""

    def __init__(self, world_size: int, global_batch_size: int, *, tail: int = 0, seed: int = 0):
        self.shape = world_size, global_batch_size, tail
        self.rng = np.random.default_rng(seed)
        self.plans: list[Plan] = []
        self.listeners: list[Callable[[Plan], None]] = []

    def at(self, step: int) -> Plan:
        if step >= len(self.plans):
            thread = threading.Thread(target=self.announce, args=(step,))
            thread.start()
            thread.join()
        return self.plans[step]

    def announce(self, step: int) -> None:
        while len(self.plans) <= step:
            plan = self.draw(len(self.plans))
            self.plans.append(plan)
            for listener in self.listeners:
                listener(plan)

    def draw(self, step: int) -> Plan:
        world_size, total, tail = self.shape
        share = self.rng.dirichlet(np.ones(world_size))
        size = self.rng.multinomial(total, share).tolist()
        rest = self.rng.multinomial(tail, share).tolist() if tail else None
        return Plan(step, step, tuple(size), rest and tuple(rest))

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        self.listeners.append(listener)


class OpenPlans(RandomPlans):
    """Likewise, with every step up for claims, and the next plan announced in the middle of it.

    As with a device that nobody waits for.
    """

    def __init__(self, world_size: int, global_batch_size: int, *, seed: int = 0):
        super().__init__(world_size, global_batch_size, seed=seed)
        self.scheme = Hybrid(first=0.25)
        self.steps: dict[int, StepClaims] = {}

    def draw(self, step: int) -> Plan:
        plan = super().draw(step)
        first = StepClaims(self.scheme, np.array(plan.batch_size)).first
        return replace(plan, first=tuple(first.tolist()))

    def seen_by(self, rank: int) -> OpenPlansOfRank:
        return OpenPlansOfRank(self, rank)

    def claim(self, rank: int, step: int, speed: float | None, *, own: bool) -> tuple[Claim, ...]:
        self.announce(step + 1)
        if step not in self.steps:
            sizes = np.array(self.plans[step].batch_size)
            self.steps[step] = StepClaims(self.scheme, sizes)
        claims = self.steps[step]
        return claims.claim_own(rank) if own else claims.claim(rank, speed)


class OpenPlansOfRank:
    """What one rank's loader sees of them."""

    def __init__(self, plans: OpenPlans, rank: int):
        self.plans, self.rank = plans, rank
        self.at, self.subscribe = plans.at, plans.subscribe

    def claim(self, step: int, *, speed: float | None = None, own: bool = False):
        return self.plans.claim(self.rank, step, speed, own=own)


class Recorder:
    """A listener that writes everything down."""

    def __init__(self):
        self.calls: list[tuple[Any, ...]] = []
        self.ahead = 0

    def begin_step(self, start):
        assert start.data_s >= 0
        self.calls.append(("step", start.step, start.num_samples, start.global_num_samples))

    def begin_forward(self, step, part, *, is_last):
        self.calls.append(("forward", part.num_samples, is_last))

    @property
    def next_unused(self):
        steps = [call[1] for call in self.calls if call[0] == "step"]
        return steps[-1] + 1 - self.ahead if steps else None

    def timed(self, phase):
        """Nothing to time."""
        return nullcontext()

    def begin_claim(self):
        """Nothing to time."""

    def end_claim(self, step, num_samples):
        """Nothing to count."""

    def came_to_end(self):
        """Nothing may be missing."""

    def end_epoch(self):
        self.calls.append(("end",))

    def sizes(self) -> list[int]:
        return [call[2] for call in self.calls if call[0] == "step"]


class Session:
    """What a loader sees of its rank: plans of one source, and a listener that hears of steps."""

    def __init__(self, plans: Any, listener: Recorder):
        self._parts = plans, listener
        self.steps = self

    def begin_epoch(self, *, cuts):
        return self

    def __getattr__(self, name: str) -> Any:
        part = next(part for part in self._parts if hasattr(part, name))
        return getattr(part, name)


class Mail:
    """The ranks, as one of them reaches the others."""

    def __init__(self, rank: int, world_size: int, share: Callable[..., Any]):
        self.rank, self.world_size, self.share = rank, world_size, share

    def check(self) -> None: ...


class Ranks:
    """All ranks of a cluster, stepping in turn; rank 0's broadcast is a variable.

    Args:
        make: returns the user's loader of a rank.
        plans: one source for all ranks, or ``OpenPlans``, which tell them apart.
        options: of every loader's context.
    """

    def __init__(
        self,
        make: Callable[[int], DataLoader],
        plans: Any,
        *,
        world_size: int,
        size: int,
        block_size: int | None = None,
        **options: Any,
    ):
        self.shared: dict[tuple[int, int], Any] = {}
        self.listeners = [Recorder() for _ in range(world_size)]
        self.loaders = [
            BalancedLoader(
                make(rank),
                StepContext(
                    ranks=Mail(rank, world_size, self.share(rank)),
                    session=Session(
                        plans.seen_by(rank) if isinstance(plans, OpenPlans) else plans,
                        self.listeners[rank],
                    ),
                    global_batch_size=size,
                    **options,
                ),
                block_size=block_size,
            )
            for rank in range(world_size)
        ]

    def share(self, rank: int) -> Callable[..., Any]:
        def share(key, values):
            if rank == 0:
                self.shared[key] = values
            return self.shared[key]

        return share

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for loader in self.loaders:
            loader.close()

    def epoch(self) -> Iterator[list[Any]]:
        """Yield the batches of every step, by rank."""
        iterators = [iter(loader) for loader in self.loaders]
        for first in iterators[0]:
            yield [first, *(next(iterator) for iterator in iterators[1:])]
        for iterator in iterators[1:]:
            assert next(iterator, None) is None

    def counted(self) -> Iterator[list[list[int]]]:
        """Yield, by rank, the indices of every step that count: no stand-ins."""
        for batches in self.epoch():
            sizes = [listener.sizes()[-1] for listener in self.listeners]
            yield [
                batch[0].tolist() if size else []
                for batch, size in zip(batches, sizes, strict=True)
            ]


def alone(loader: DataLoader, plans: Any = None, *, size: int | None = None, **options: Any):
    """Return the only rank's balanced loader of a cluster of one."""
    size = size or loader.batch_size
    if plans is None:
        tail = len(loader.sampler) % size or None
        plans = FixedPlan(size, tail=tail and (tail,))
    block_size = options.pop("block_size", None)
    context = StepContext(
        ranks=Mail(0, 1, options.pop("share", lambda key, values: values)),
        session=Session(plans, options.pop("listener", Recorder())),
        global_batch_size=size,
        **options,
    )
    return BalancedLoader(loader, context, block_size=block_size)


def flat(parts: Iterable[Iterable[Any]]) -> list[Any]:
    """Return the items of all parts, one after the other."""
    return list(chain.from_iterable(parts))


def loader_threads() -> Sequence[str]:
    """Return the names of the threads that loaders left running."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("evenstep-")]
