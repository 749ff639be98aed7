"""A run under way: opened at the first step, closed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..events import Hook, RunEnded, RunStarted
from ..planner import Job, Plan, Planner
from ..policies import AbstractPolicy, reads_resources
from ..telemetry import Fanout, Outlet, close_all, open_outlets
from ._claiming import claims_of
from ._clock import clock_of
from ._conductor import StepConductor
from ._connection import Connection
from ._estimates import Estimates
from ._exchange._crew import Crew
from ._exchange._dropping import Dropping
from ._exchange._startup import WorkerFacts
from ._machine import MachineReader, NoReader, PsutilReader
from ._memory._memory import memory_of
from ._model._compile_watch import CompileWatch
from ._model._wrapping import Wrapping
from ._observer import StepObserver
from ._options import Runtime

if TYPE_CHECKING:
    from ..network._torch._reduction import Reduction


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is opened with, all known before its first step.

    Attributes:
        policy: decides the sizes.
        job: what is planned for.
        num_steps: optimizer steps in an epoch.
        loss_reduction: ``"mean"`` or ``"sum"``.
        runtime: heartbeats, deadlines, the progress line, memory.
        device: where this rank computes.
        wrapping: how the models are wrapped.
        estimates: what an earlier run has learnt about the workers.
        watch: notices what is compiled.
        counts_units: whether the loss is a mean over something else than samples.
        has_streams: whether samples come from an ``IterableDataset``.
        least_workers: how many have to be left if one is dropped; None to drop none.
        reduction: sums gradients by shares; None is plain all-reduce.
        versions: tells by a number whether parameters have changed.
    """

    policy: AbstractPolicy[Any]
    job: Job
    num_steps: int
    loss_reduction: str
    runtime: Runtime
    device: torch.device
    wrapping: Wrapping
    estimates: Estimates
    watch: CompileWatch
    counts_units: bool
    has_streams: bool
    least_workers: Callable[[], int | None]
    reduction: Reduction | None
    versions: Callable[[], int]


class Run:
    """The open parts of a run on this rank. All ranks open one at their first step.

    Args:
        settings: what to open.
        crew: all ranks.
        connection: with the others.
        listeners: told of every plan.
    """

    def __init__(
        self,
        settings: RunSettings,
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
        self._speaks = self._is_first and not (peers is not None and peers.follows)
        self._outlets: list[Outlet] = []
        facts = connection.facts[: crew.num_workers]
        self._emit = self._dropping(settings, crew, facts)
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
            _machine_of(settings),
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
        for outlet in self._outlets:
            outlet.start()
        if self._is_first:
            self._lead(planner, settings, facts)

    def estimates(self) -> Estimates:
        """Return what was learnt so far; nothing on ranks other than 0."""
        return Estimates(self._workers, self.exchange.decisions.learnt())

    def close(self) -> None:
        """Say goodbye to the others, and have the sinks take what is left."""
        self.conductor.close()
        self.exchange.close()
        if self._is_first:
            self._emit(RunEnded(self.conductor.num_steps))
        close_all(self._outlets)

    def _lead(self, planner: Planner, settings: RunSettings, facts: Sequence[WorkerFacts]) -> None:
        self._emit(
            RunStarted(
                world_size=settings.job.world_size,
                global_batch_size=settings.job.global_batch_size,
                num_steps=settings.num_steps,
                policy=repr(settings.policy),
                hosts=tuple(worker.host for worker in facts),
                devices=tuple(worker.device for worker in facts),
            )
        )
        restored = settings.estimates.apply(planner, self._workers)
        if restored is not None:
            self._emit(restored)
        self.exchange.lead(planner)
        if settings.reduction is not None:
            settings.reduction.lead()

    def _observers(self, reduction: Reduction | None, lag: int) -> tuple[StepObserver, ...]:
        if reduction is None:
            return ()
        return (reduction.join(self.exchange, lag=lag, emit=self._emit),)

    def _dropping(self, settings: RunSettings, crew: Crew, facts: Sequence[WorkerFacts]) -> Hook:
        """Return the sinks, behind what acts on the news of an unhelpful worker."""
        return Dropping(
            self._open_sinks(settings),
            facts,
            stop=lambda: self.exchange.stop,
            least=settings.least_workers,
            has_peers=crew.side.peers is not None,
            has_servers=crew.num_servers > 0,
        )

    def _open_sinks(self, settings: RunSettings) -> Hook:
        if not self._speaks:
            return Fanout(())
        runtime = settings.runtime
        self._outlets += open_outlets(
            runtime.run_dir, line_every=runtime.line_every, hooks=runtime.hooks
        )
        return Fanout(self._outlets)


def _planner_of(settings: RunSettings, *, has_peers: bool) -> Planner:
    claims = claims_of(
        settings.policy,
        settings.job,
        settings.runtime,
        counts_units=settings.counts_units,
        has_peers=has_peers,
        has_streams=settings.has_streams,
    )
    return Planner(settings.policy, settings.job, claims=claims)


def _machine_of(settings: RunSettings) -> MachineReader:
    if not reads_resources(settings.policy):
        return NoReader()
    return settings.runtime.machine or PsutilReader()
