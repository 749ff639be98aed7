"""Streams, and ranks that read them as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenstep.torch._data._step import StepCount
from evenstep.torch._data.loaders._base import StepContext
from evenstep.torch._data.loaders._stream import StreamLoader

from .loader_fakes import FixedPlan, RandomPlans, Recorder, Session


class Numbers(IterableDataset):
    """The numbers of a range; loader workers take turns."""

    def __init__(self, *limits: int) -> None:
        self.numbers = range(*limits)

    def __iter__(self):
        info = get_worker_info()
        return iter(self.numbers if info is None else self.numbers[info.id :: info.num_workers])


class Sized(Numbers):
    """One that knows its length."""

    def __len__(self):
        return len(self.numbers)


class Shuffled(Numbers):
    """One whose order comes from torch's generator: a worker's own, in workers."""

    def __iter__(self):
        numbers = list(super().__iter__())
        return iter([numbers[k] for k in torch.randperm(len(numbers)).tolist()])


class LockedPlans(RandomPlans):
    """Plans for ranks that ask from several threads."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.lock = threading.Lock()

    def at(self, step):
        with self.lock:
            return super().at(step)


class Meeting:
    """The side group of ranks that are threads."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.rounds: list[dict[int, list[int]]] = []
        self.broken = False

    def side(self, rank: int) -> Side:
        return Side(self, rank)


class Side:
    """One rank's."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, meeting.world_size
        self.num_rounds = 0

    def gather(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        meeting, number = self.meeting, self.num_rounds
        self.num_rounds += 1
        with meeting.changed:
            if len(meeting.rounds) <= number:
                meeting.rounds.append({})
            assert self.rank not in meeting.rounds[number]
            meeting.rounds[number][self.rank] = numbers
            meeting.changed.notify_all()

        def wait() -> list[list[int]]:
            said = meeting.rounds[number]
            with meeting.changed:
                full = meeting.changed.wait_for(
                    lambda: len(said) == self.world_size or meeting.broken, timeout=30
                )
            assert full, "a rank did not come"
            assert len(said) == self.world_size, "a rank has failed"
            return [said[rank] for rank in range(self.world_size)]

        return wait

    def share(self, key, ints):
        return np.array(self.gather([0] if ints is None else ints.tolist())()[0])


def cluster(
    make: Callable[[int], DataLoader],
    plans: Any,
    use: Callable[[StreamLoader, Recorder], Any],
    *,
    kind: str,
    world_size: int,
    size: int,
    count: StepCount | None = None,
) -> list[Any]:
    """Return what ``use`` gives for the loader of every rank, each in a thread of its own."""
    meeting, results, errors = Meeting(world_size), [None] * world_size, []

    def work(rank: int) -> None:
        recorder = Recorder()
        try:
            context = StepContext(
                ranks=meeting.side(rank),
                session=Session(plans, recorder),
                global_batch_size=size,
                count=count or StepCount(),
            )
            loader = StreamLoader(make(rank), context, kind=kind)
            results[rank] = use(loader, recorder)
            loader.close()
        except BaseException as error:
            errors.append(error)
            with meeting.changed:
                meeting.broken = True
                meeting.changed.notify_all()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def counted(loader: StreamLoader, recorder: Recorder, most: int | None = None) -> list[list[int]]:
    """Return this rank's numbers of every step that count, of at most ``most`` steps."""
    return [part for _, part in zip(range(most or 10**9), _counted(loader, recorder))]  # noqa: B905


def _counted(loader: StreamLoader, recorder: Recorder) -> Iterator[list[int]]:
    for batch in loader:
        numbers = batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)
        size = recorder.sizes()[-1]
        assert len(numbers) == max(size, 1)
        yield numbers[:size]


def once(make, *, kind="same", world_size=2, plan=(2, 2), use=counted):
    """Return what `use` gives for every rank, of global batches of 4 under one plan."""
    return cluster(make, FixedPlan(*plan), use, kind=kind, world_size=world_size, size=4)


def lone(loader, kind="same", size=4, count=None):
    """Return the only rank's loader of a cluster of one."""
    return cluster(
        lambda rank: loader,
        FixedPlan(size),
        lambda own, _: own,
        kind=kind,
        world_size=1,
        size=size,
        count=count,
    )[0]
