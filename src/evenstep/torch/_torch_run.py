"""A run under way: opened at the first step, closed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._run._estimates import Estimates
from .._run._machine_reader import machine_reader_of
from .._run._run_record import RunRecord, RunSettings, lead
from ..planner import Plan, Planner
from ._claiming import claims_of
from ._clock import clock_of
from ._conductor import StepConductor
from ._connection import Connection
from ._exchange._crew import Crew
from ._exchange._dropping import Dropping
from ._exchange._startup import WorkerFacts
from ._memory._memory import memory_of
from ._model._compile_watch import CompileWatch
from ._model._wrapping import Wrapping
from ._observer import StepObserver
from ._options import Runtime

if TYPE_CHECKING:
    from ..network._torch._reduction import Reduction


@dataclass(frozen=True, slots=True)
class TorchRunSettings(RunSettings):
    """What a run is opened with here, all known before its first step.

    Attributes:
        runtime: heartbeats, deadlines, the line for people, memory.
        loss_reduction: ``"mean"`` or ``"sum"``.
        device: where this rank computes.
        wrapping: how the models are wrapped.
        watch: notices what is compiled.
        counts_units: whether the loss is a mean over something else than samples.
        has_streams: whether samples come from an ``IterableDataset``.
        least_workers: how many have to be left if one is dropped; None to drop none.
        reduction: sums gradients by shares; None is plain all-reduce.
        versions: tells by a number whether parameters have changed.
    """

    runtime: Runtime
    loss_reduction: str
    device: torch.device
    wrapping: Wrapping
    watch: CompileWatch
    counts_units: bool
    has_streams: bool
    least_workers: Callable[[], int | None]
    reduction: Reduction | None
    versions: Callable[[], int]


class TorchRun:
    """The open parts of a run on this rank. All ranks open one at their first step.

    Args:
        settings: what to open.
        crew: all ranks.
        connection: with the others.
        listeners: told of every plan.
    """

    def __init__(
        self,
        settings: TorchRunSettings,
        crew: Crew,
        connection: Connection,
        listeners: Sequence[Callable[[Plan], None]],
    ) -> None:
        side, peers = crew.side, crew.side.peers
        runtime, device = settings.runtime, settings.device
        # On every rank, though rank 0 alone uses it: what it refuses, all of them should hear.
        planner = _planner_of(settings, has_peers=peers is not None)
        self.rank = side.rank
        self._is_first = side.rank == 0
        speaks = self._is_first and not (peers is not None and peers.follows)
        self._record = RunRecord(runtime, speaks=speaks)
        facts = connection.facts[: crew.num_workers]
        self._emit = Dropping(  # acts on the news of an unhelpful worker before the sinks have it
            self._record.emit,
            facts,
            stop=lambda: self.exchange.stop,
            least=settings.least_workers,
            has_peers=peers is not None,
            has_servers=crew.num_servers > 0,
        )
        self._workers = [worker.identity for worker in facts]
        connection.emit_to(self._emit)
        self.exchange = connection.exchange
        for listener in listeners:
            follows = peers is not None and peers.follows
            (peers if peers is not None and follows else self.exchange).subscribe(listener)
        if peers is not None and not peers.follows:
            self.exchange.subscribe(peers.hear)
        settings.wrapping.open(settings.policy)
        self.conductor = StepConductor(
            self.exchange,
            settings.wrapping.meter(clock_of(device)),
            runtime.memory or memory_of(device),
            machine_reader_of(settings.policy, runtime.machine),
            world_size=side.world_size,
            loss_reduction=settings.loss_reduction,
            exact=runtime.freshness == "exact",
            watch=settings.watch,
            cuts=settings.wrapping.cuts,
            versions=settings.versions,
            meet=settings.wrapping.meet if settings.wrapping.meets else None,
            check_reduced=settings.wrapping.check_reduced,
            sharded=settings.wrapping.is_sharded,
            peers=peers,
            observers=self._observers(settings.reduction, connection.lag),
        )
        self._record.start()
        if self._is_first:
            self._lead(planner, settings, facts)

    def estimates(self) -> Estimates:
        """Return what was learnt so far; nothing on ranks other than 0."""
        return Estimates(self._workers, self.exchange.decisions.learnt())

    def close(self) -> None:
        """Say goodbye to the others, and have the sinks take what is left."""
        self.conductor.close()
        self.exchange.close()
        self._record.end(self.conductor.num_steps if self._is_first else None)

    def _lead(
        self, planner: Planner, settings: TorchRunSettings, facts: Sequence[WorkerFacts]
    ) -> None:
        lead(
            self.exchange,
            planner,
            settings,
            self._emit,
            hosts=[worker.host for worker in facts],
            devices=[worker.device for worker in facts],
            workers=self._workers,
        )
        if settings.reduction is not None:
            settings.reduction.lead()

    def _observers(self, reduction: Reduction | None, lag: int) -> tuple[StepObserver, ...]:
        if reduction is None:
            return ()
        return (reduction.join(self.exchange, lag=lag, emit=self._emit),)


def _planner_of(settings: TorchRunSettings, *, has_peers: bool) -> Planner:
    claims = claims_of(
        settings.policy,
        settings.job,
        settings.runtime,
        counts_units=settings.counts_units,
        has_peers=has_peers,
        has_streams=settings.has_streams,
    )
    return Planner(settings.policy, settings.job, claims=claims)
