"""Carries what one rank records to rank 0, every few seconds, in a thread of its own."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, thread_time
from typing import NamedTuple, Protocol, final

from .._host import HostReader
from ._advice_text import advice_notes
from ._leader import WatchLeader
from ._start_watch import WatchSettings
from ._step_records import (
    MailStore,
    RankHello,
    RankReader,
    RankReport,
    RankSender,
    StepRecord,
    grouped,
)
from ._watched_run import CallSite

_LEAST_EVERY_S, _MOST_EVERY_S = 1.0, 10.0  # between two reports
_MOST_RECORDS = 64  # in one key, and a second; shorter steps are summed
_BEHIND_S = 0.25  # rank 0 is behind the others, so that it has what they have just sent
_LAST_S = 1.0  # for which rank 0 waits at its end for the others' last reports


class RecordedSteps(Protocol):
    """What records a rank's steps.

    Attributes:
        step: the one under way, from 0.
    """

    step: int

    def take_records(self) -> list[StepRecord]:
        """Return the steps that are over, and were not returned before."""


class RankEnds(NamedTuple):
    """A rank's ends of the channel by which ranks report to rank 0.

    Attributes:
        rank: this process's.
        every_s: seconds between its reports.
        sender: carries this rank's reports; None on rank 0, which needs none.
        reader: reads the others' reports; on rank 0.
        leader: makes something of them; on rank 0.
    """

    rank: int
    every_s: float
    sender: RankSender | None
    reader: RankReader | None
    leader: WatchLeader | None


def ends_of(store: MailStore, rank: int, world_size: int, settings: WatchSettings) -> RankEnds:
    """Return a rank's ends, over a store with a prefix of this watch's own.

    It reports with each line, and at least every ten seconds: to wake up costs more than ten steps'
    records do.
    """
    line_s = settings.every_s or _MOST_EVERY_S
    every_s = max(line_s / math.ceil(line_s / _MOST_EVERY_S), _LEAST_EVERY_S)
    if rank:
        return RankEnds(rank, every_s, RankSender(store, rank), None, None)
    leader = WatchLeader(world_size, settings, now=monotonic, notes=advice_notes)
    return RankEnds(rank, every_s, None, RankReader(store, range(1, world_size)), leader)


@final
class Courier:
    """Reports this rank's steps to rank 0; on rank 0, passes those of all ranks to the leader.

    Args:
        steps: of this rank.
        hello: who this rank is.
        host: reads what this process goes through.
        ends: of this rank.
        on_fault: called with what was raised in the thread.
        prepare: called first in the thread.

    Attributes:
        thread_s: CPU seconds of the thread, so far.
    """

    def __init__(
        self,
        steps: RecordedSteps,
        hello: RankHello,
        host: HostReader,
        ends: RankEnds,
        *,
        on_fault: Callable[[BaseException], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.thread_s = 0.0
        self._steps, self._hello, self._host = steps, hello, host
        self._rank, self._every_s, self._sender, self._reader, self._leader = ends
        self._on_fault, self._prepare = on_fault, prepare
        self._left: list[StepRecord] = []  # short steps whose group is not complete
        self._group_size = 1
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin to report."""
        if self._leader is not None:
            self._leader.meet(self._rank, self._hello)
        self._thread = threading.Thread(target=self._run, name="evenstep-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Report no more."""
        self._over.set()

    def close(self, kind: str, sites: Sequence[CallSite], *, own_s: Callable[[], float]) -> None:
        """Send the last report, and on rank 0 say what was seen.

        Args:
            kind: how gradients are exchanged.
            sites: where the script made its model and its loader.
            own_s: seconds that watching took of this rank.
        """
        self.stop()
        if self._thread is not None:
            self._thread.join(2.0)
            if self._thread.is_alive():
                return
        if self._leader is None:
            with suppress(Exception):  # rank 0, which may have the store, may have left before
                self._tell(is_last=True)
            return
        self._tell(is_last=True)
        until = monotonic() + _LAST_S
        while not self._leader.is_complete and monotonic() < until:
            threading.Event().wait(0.01)
            self._listen()
        self._leader.end(kind, sites, own_s=own_s())

    def _run(self) -> None:
        """Report what is there, again and again; the thread's own life."""
        try:
            self._prepare()
            if self._sender is not None:
                self._sender.hello(self._hello)
            due_s = monotonic() + (_BEHIND_S if self._leader is not None else 0.0)
            while True:
                due_s = max(due_s + self._every_s, monotonic())
                if self._over.wait(due_s - monotonic()):
                    break
                self._tell()
                self.thread_s = thread_time()
        except Exception as error:
            self._on_fault(error)

    def _tell(self, *, is_last: bool = False) -> None:
        new = self._steps.take_records()
        while len(new) > _MOST_RECORDS * self._every_s * self._group_size:
            self._group_size *= 2
        done, self._left = grouped([*self._left, *new], self._group_size)
        while len(done) > _MOST_RECORDS:
            self._hand_over(RankReport(tuple(done[:_MOST_RECORDS]), None))
            done = done[_MOST_RECORDS:]
        host = self._host.read(self._steps.step)
        self._hand_over(RankReport(tuple(done), host, is_last=is_last))
        self._listen()

    def _hand_over(self, report: RankReport) -> None:
        if self._sender is not None:
            self._sender.send(report)
        if self._leader is not None:
            self._leader.take(self._rank, report)

    def _listen(self) -> None:
        if self._leader is not None and self._reader is not None:
            for rank, hello in self._reader.hellos():
                self._leader.meet(rank, hello)
            for rank, report in self._reader.read():
                self._leader.take(rank, report)
            self._leader.work()


def say_off(rank: int | None, error: BaseException) -> None:
    """Say that a fault has switched a watch off."""
    where = "" if rank is None else f" on rank {rank}"
    with suppress(Exception):
        print(
            f"evenstep watch: off{where}, training goes on ({type(error).__name__}: {error})\n",
            end="",  # one write, as other ranks say so at the same moment
            file=sys.stderr,
            flush=True,
        )
