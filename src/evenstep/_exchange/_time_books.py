"""Rank 0's books of where the time went, and of who waits for whom, as events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import final

from .._diagnosis import (
    Diagnoser,
    Diagnosis,
    HostClues,
    StepAccounts,
    StepClues,
    accounted,
    diagnosed,
)
from ..events import Hook, StepsAccounted
from ._internal import log_fault

_LOOK_S = 10.0  # from one diagnosis to the next
_CALM_S = 30.0  # from one that is told to the next
_FEWEST = 10  # steps, for a diagnosis at the end
_MOST_CLUES = 256  # steps with some whose times are not complete

_GOES_ON = "Training and balancing go on; who waits for whom is not told any more in this run."


@final
class TimeBooks:
    """Tells where the time went once there is enough of it, and who waits for whom if that changes.

    At the end it tells who waited for whom in the whole run. A diagnosis that raises is logged, and
    there is no other one in the run.

    Args:
        world_size: number of workers.
        emit: takes every event.
        clock: monotonic seconds.
    """

    def __init__(self, world_size: int, *, emit: Hook, clock: Callable[[], float]) -> None:
        self._emit = emit
        self._clock = clock
        self._lock = threading.Lock()  # reports arrive while events are told
        self._telling = threading.Lock()
        self._accounts = StepAccounts(world_size)
        self._diagnoser = Diagnoser(world_size, parts_stay=False) if world_size > 1 else None
        self._ranks = range(world_size)
        self._clues: dict[int, dict[int, StepClues]] = {}  # by step and rank, where there are some
        self._hosts: list[tuple[int, HostClues]] = []
        self._look_s = clock() + _LOOK_S
        self._calm_until_s = 0.0
        self._said: set[tuple[str, int | None]] = set()

    def add(self, rank: int, step: int, spent_us: Sequence[int]) -> bool:
        """Take in one rank's times of a step; return whether there is enough to be told."""
        with self._lock:
            return self._accounts.add(rank, step, spent_us)

    def add_clues(self, rank: int, step: int, clues: StepClues) -> None:
        """Take in what one rank noticed in a step, before its times."""
        if self._diagnoser is not None:
            with self._lock:
                self._clues.setdefault(step, {})[rank] = clues
                if len(self._clues) > _MOST_CLUES:  # where some rank tells no times at all
                    del self._clues[next(iter(self._clues))]

    def add_host(self, rank: int, clues: HostClues) -> None:
        """Take in what a rank's process and machine did since its look before."""
        if self._diagnoser is not None:
            with self._lock:
                self._hosts.append((rank, clues))

    def tell(self) -> None:
        """Tell of the steps that all ranks are through with."""
        accounts, found = self._take(self._changed)
        self._tell(accounts, found)

    def end(self) -> None:
        """Tell of all that is left, and of the run as a whole; once."""
        accounts, found = self._take(self._of_whole_run)
        self._diagnoser = None
        self._tell(accounts, found)

    def _tell(self, accounts: StepsAccounted | None, found: Diagnosis | None) -> None:
        if accounts is not None:
            self._emit(accounts)
        if found is not None:
            self._emit(diagnosed(found))

    def _take(
        self, diagnose: Callable[[Diagnoser], Diagnosis | None]
    ) -> tuple[StepsAccounted | None, Diagnosis | None]:
        """Return the account of the complete steps, and the diagnosis with them, if it is due."""
        found = None
        with self._telling:
            with self._lock:
                steps = self._accounts.take()
                hosts, self._hosts = self._hosts, []
                clues = [self._clues_of(step) for step, _ in steps]
            if self._diagnoser is not None:
                try:
                    for rank, host in hosts:
                        self._diagnoser.add_host(rank, host)
                    for (step, spent_us), noticed in zip(steps, clues, strict=True):
                        self._diagnoser.add(step, spent_us, noticed)
                    found = diagnose(self._diagnoser)
                except Exception as error:
                    log_fault(steps[-1][0] if steps else None, error, _GOES_ON)
                    self._diagnoser = None
        return accounted(*zip(*steps, strict=True)) if steps else None, found

    def _clues_of(self, step: int) -> list[StepClues] | None:
        """Return what all ranks noticed in a step that is complete; None if that is nothing."""
        found = self._clues.pop(step, None)
        while self._clues and (oldest := next(iter(self._clues))) < step:
            del self._clues[oldest]  # of a step that some rank told no times of
        none = StepClues()
        return None if found is None else [found.get(rank, none) for rank in self._ranks]

    def _changed(self, diagnoser: Diagnoser) -> Diagnosis | None:
        """Return a diagnosis that names other causes than the last one that was told."""
        now_s = self._clock()
        if now_s < self._look_s:
            return None
        self._look_s = now_s + _LOOK_S
        found = diagnoser.diagnose()
        names = {(str(one.cause), one.rank) for one in found.found}
        if names == self._said or now_s < self._calm_until_s:
            return None
        self._said = names
        self._calm_until_s = now_s + _CALM_S
        return found

    def _of_whole_run(self, diagnoser: Diagnoser) -> Diagnosis | None:
        found = diagnoser.diagnose(whole_run=True)
        return found if found.num_steps >= _FEWEST else None
