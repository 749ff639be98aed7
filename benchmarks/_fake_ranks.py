"""Ranks without models, several to a process: connections that report steps and hear of plans."""

from __future__ import annotations

import logging
import resource
import selectors
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic, process_time, thread_time
from typing import Any

import numpy as np

from evenstep import Cluster, Decision, StepTimings
from evenstep._exchange._channel import Peer, StarChannel, Text, text_of
from evenstep._exchange._exchange import Exchange
from evenstep._exchange._meeting import connect_star
from evenstep._exchange._message_kinds import ENDED, Answer, RankLost, StepReports, read, written
from evenstep._exchange._threads import Framework
from evenstep._planner import Job, Planner, Report
from evenstep.events import Event, StepMeasured
from evenstep.policies import AbstractPolicy

HEARTBEAT_S, DEADLINE_S = 1.0, 10.0
_PER_RANK = 32  # samples
_NOWHERE = Framework(lambda thread: ENDED, lambda thread: False, "start the benchmark again")


@dataclass(frozen=True)
class Moving(AbstractPolicy[int]):
    """Moves one sample from one rank to the next after every step, so that every plan is new."""

    name = "moving"

    def init(self, cluster: Cluster) -> Decision[int]:
        """Divide equally."""
        return Decision(np.full(cluster.world_size, _PER_RANK), 0, "start")

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        """Move it on."""
        sizes = np.full(cluster.world_size, _PER_RANK)
        sizes[state % len(sizes)] -= 1
        sizes[(state + 1) % len(sizes)] += 1
        return Decision(sizes, state + 1, "moved")


class FakeRanks:
    """Ranks on one thread: each answers a plan with the report of its step.

    Args:
        ranks: their numbers.
        world_size: of the run.
        meeting: what rank 0 has shared.

    Attributes:
        told: ranks that are lost, as rank 0 has told each of these, and when.
    """

    def __init__(self, ranks: Sequence[int], world_size: int, meeting: dict[str, Any]) -> None:
        join = partial(_join, world_size, meeting)
        with ThreadPoolExecutor(len(ranks)) as threads:
            self._peers = dict(zip(ranks, threads.map(join, ranks), strict=True))
        self._global = _PER_RANK * world_size
        self._selector = selectors.DefaultSelector()
        for rank, peer in self._peers.items():
            self._selector.register(peer.connection, selectors.EVENT_READ, rank)
        self._reports: dict[int, Text] = {}
        self.told: list[tuple[int, float]] = []

    def serve(self, pipe: Connection) -> None:
        """Do so until the parent ends it."""
        self._selector.register(pipe, selectors.EVENT_READ)
        beat_s = monotonic()
        while True:
            for key, _ in self._selector.select(max(0.0, beat_s - monotonic())):
                if key.data is None:
                    return
                self._read(key.data)
            if monotonic() >= beat_s:
                beat_s = monotonic() + HEARTBEAT_S
                for peer in self._peers.values():
                    peer.beat()

    def _read(self, rank: int) -> None:
        for rows in self._peers[rank].receive() or ():
            for message in read(rows):
                match message:
                    case Answer(index, through):
                        for step in range(index, through + 1):
                            self._peers[rank].send(self._report(step + 1))
                    case RankLost(lost):
                        self.told.append((lost, monotonic()))
        if self._peers[rank].end:
            self._selector.unregister(self._peers[rank].connection)

    def _report(self, step: int) -> Text:
        """Return the report of a step, the same of all ranks."""
        if step not in self._reports:
            report = Report(step, _PER_RANK, self._global, 0.1, 0.001, 0.12)
            self._reports = {step: text_of(written([StepReports(step, (report,))]))}
        return self._reports[step]


def fake(pipe: Connection, ranks: Sequence[int], world_size: int) -> None:
    """Be some ranks, and do what the parent says."""
    _prepare()
    pipe.send("ready")
    made = FakeRanks(ranks, world_size, pipe.recv())
    pipe.send("joined")
    made.serve(pipe)
    pipe.send(made.told)


def _join(world_size: int, meeting: dict[str, Any], rank: int) -> Peer:
    return connect_star(rank, world_size, lambda value: meeting, addresses=[])[0]


class Noting(Exchange):
    """Rank 0's exchange, which notes when each rank was lost."""

    lost_at_s: dict[int, float]

    def lost(self, peer: int, problem: str) -> None:
        """Note it, too."""
        self.lost_at_s[peer] = monotonic()
        super().lost(peer, problem)


class Timed(Planner):
    """A planner that measures the CPU time of its own arithmetic."""

    cpu_s = 0.0

    def observe(self, *arguments: Any, **settings: Any) -> tuple[Event, ...]:
        """Measure it."""
        began_s = thread_time()
        try:
            return super().observe(*arguments, **settings)
        finally:
            self.cpu_s += thread_time() - began_s

    def account(self, *arguments: Any) -> StepMeasured | None:
        """Measure it."""
        began_s = thread_time()
        try:
            return super().account(*arguments)
        finally:
            self.cpu_s += thread_time() - began_s


def rank_0(pipe: Connection, world_size: int) -> None:
    """Be rank 0, and do what the parent says."""
    _prepare()

    def share(meeting: Any) -> Any:
        pipe.send(meeting)
        return meeting

    peers = connect_star(0, world_size, share, addresses=["127.0.0.1"])
    channel = StarChannel(peers, heartbeat_s=HEARTBEAT_S, deadline_s=DEADLINE_S)
    exchange = Noting(
        0, ["here"] * world_size, channel, framework=_NOWHERE, emit=lambda event: None
    )
    exchange.lost_at_s = {}
    exchange.start()
    planner = Timed(Moving(), Job(world_size, _PER_RANK * world_size))
    exchange.lead(planner)
    pipe.send("joined")
    step = 0
    while (word := pipe.recv()) != "end":
        match word:
            case ("steps", number):
                cpu_s, planning_s = process_time(), planner.cpu_s
                for step in range(step, step + number):  # noqa: B020  # the range is made before
                    size = exchange.at(step).batch_size[0]
                    report = Report(step, size, _PER_RANK * world_size, 0.1, 0.001)
                    told = (StepReports(step, (report,)),)
                    exchange.report(step, partial(tuple, told))
                exchange.at(step := step + 1)
                planning_s = planner.cpu_s - planning_s
                pipe.send(((process_time() - cpu_s) / number, planning_s / number))
            case "losses":
                pipe.send(exchange.lost_at_s)
    exchange.close()


def _prepare() -> None:
    """Have room for as many connections as the machine allows; say nothing of those that break."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.getLogger("evenstep").setLevel(logging.CRITICAL + 1)
