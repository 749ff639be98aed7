"""A run under way: opened at the first step, closed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .._exchange._channel import StarChannel
from .._exchange._exchange import Exchange
from .._exchange._meeting import connect_star
from .._planner import Job, Planner
from .._settings import checked_ports
from .._telemetry import Fanout, Outlet, close_all, open_outlets
from ..events import Hook, RunEnded, RunStarted
from ..policies import AbstractPolicy
from ..policies._resources import reads_resources
from ._board import Board, ServiceBoard, check_alike, gathered
from ._conductor import StepConductor
from ._drift import Row, check_same_samples
from ._estimates import Kept
from ._exchange import TENSORFLOW, StepExchange
from ._machine import MachineReader
from ._options import Runtime
from ._workers import Workers, abort_collectives


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is opened with.

    Attributes:
        policy: decides the sizes.
        job: what is planned for.
        num_steps: of an epoch.
        loss_reduction: ``"mean"`` or ``"sum"``.
        runtime: heartbeats, the deadline, the progress line.
        kept: of an earlier run.
        num_optimizers: returns how many optimizers are known by now.
        alike: what has to be the same on all workers, by name, to be compared.
    """

    policy: AbstractPolicy[Any]
    job: Job
    num_steps: int
    loss_reduction: Literal["mean", "sum"]
    runtime: Runtime
    kept: Kept
    num_optimizers: Callable[[], int]
    alike: Mapping[str, Any]


class Run:
    """The open parts of a run on this worker. Collective: all workers open one together.

    Args:
        settings: what to open.
        workers: who trains together, several of them.
        board: where workers leave each other messages; None is the strategy's own service.

    Raises:
        ValueError: workers have other settings than each other.
        ConnectionError: they did not come together in time.
    """

    def __init__(
        self,
        settings: RunSettings,
        workers: Workers,
        board: Board | None = None,
    ) -> None:
        runtime = settings.runtime
        # On every rank, though rank 0 alone uses it: what it refuses, all of them should hear.
        planner = Planner(settings.policy, settings.job)
        self._workers = workers
        self._num_compared = 0
        self._board = board = board or ServiceBoard(
            workers, wait_s=runtime.meeting_s, deadline_s=runtime.deadline_s
        )
        check_alike(board, workers.rank, workers.world_size, settings.alike)
        self._outlets: list[Outlet] = []
        self._emit = self._open_sinks(settings)
        star = connect_star(
            workers.rank,
            workers.world_size,
            lambda meeting: _shared(board, meeting),
            addresses=[runtime.address or workers.hosts[0]],
            ports=checked_ports(runtime.ports),
            timeout_s=runtime.meeting_s,
        )
        channel = StarChannel(
            star.connections,
            heartbeat_s=runtime.heartbeat_s,
            deadline_s=runtime.deadline_s,
            star=star,
        )
        self.exchange = Exchange(
            workers.rank,
            workers.hosts,
            channel,
            framework=TENSORFLOW,
            emit=self._emit,
            heartbeat_s=runtime.heartbeat_s,
            hang_s=runtime.hang_s,
            grace_s=3 * runtime.heartbeat_s,
        )
        # Lets the training come out of the collective that it may be stuck in.
        self.exchange.on_loss = lambda error: abort_collectives(str(error))
        self.conductor = StepConductor(
            StepExchange(self.exchange),
            MachineReader(asked=reads_resources(settings.policy)),
            world_size=workers.world_size,
            loss_reduction=settings.loss_reduction,
            first_step=settings.kept.num_steps,
            num_optimizers=settings.num_optimizers,
        )
        for outlet in self._outlets:
            outlet.start()
        self.exchange.start()
        if workers.rank == 0:
            self._lead(planner, settings)

    def compare(self, rows: list[Row]) -> None:
        """Compare what workers have read in an epoch. Collective.

        Raises:
            ValueError: some have read other samples.
            WorkerLostError: a worker was lost meanwhile.
        """
        name = f"samples of epoch {self._num_compared}"
        self._num_compared += 1

        def look() -> None:  # whether a worker that is waited for was lost, or has ended the run
            self.exchange.need_all(self.conductor.num_steps)

        said = gathered(self._board, self._workers.rank, self._workers.world_size, name, rows, look)
        check_same_samples(said)

    def close(self) -> None:
        """Say goodbye to the others, and have the sinks take what is left."""
        if not self.exchange.is_broken:
            self.conductor.close()
        self.exchange.close()
        if self._workers.rank == 0:
            self._emit(RunEnded(self.conductor.num_done))
        close_all(self._outlets)

    def _lead(self, planner: Planner, settings: RunSettings) -> None:
        self._emit(
            RunStarted(
                world_size=settings.job.world_size,
                global_batch_size=settings.job.global_batch_size,
                num_steps=settings.num_steps,
                policy=repr(settings.policy),
                hosts=self._workers.hosts,
                devices=("tensorflow",) * self._workers.world_size,
            )
        )
        restored = settings.kept.apply(planner, self._workers.hosts)
        if restored is not None:
            self._emit(restored)
        self.exchange.lead(planner)

    def _open_sinks(self, settings: RunSettings) -> Hook:
        if self._workers.rank != 0:
            return Fanout(())
        runtime = settings.runtime
        self._outlets += open_outlets(
            runtime.run_dir, line_every=runtime.line_every, hooks=runtime.hooks
        )
        return Fanout(self._outlets)


def _shared(board: Board, value: Any) -> Any:
    """Return what rank 0 calls this with, on every rank; the others call it with None."""
    if value is not None:
        board.put("meeting", value)
    return board.get("meeting")
