"""What a run reports of itself on rank 0: its sinks, its beginning, what was learnt, its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._exchange._exchange import Exchange
from .._planner import AbstractPlanner, Job
from .._telemetry import Outlet, close_all, open_outlets, versions_here
from ..events import Event, Hook, RunEnded, RunStarted
from ..policies import AbstractPolicy
from ._estimates import Estimates
from ._runtime import AbstractRuntime


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is opened with in every framework.

    Attributes:
        policy: decides the sizes.
        job: what is planned for.
        num_steps: optimizer steps in an epoch.
        estimates: what an earlier run has learnt about the workers.
    """

    policy: AbstractPolicy[Any]
    job: Job
    num_steps: int
    estimates: Estimates


class RunRecord:
    """The events of a run on this rank, from before its exchange is open until after its end.

    Args:
        runtime: names the sinks.
        speaks: whether this rank has them.
    """

    def __init__(self, runtime: AbstractRuntime, *, speaks: bool) -> None:
        self._outlets: list[Outlet] = []
        if speaks:
            self._outlets = open_outlets(
                runtime.run_dir, line_every=runtime.line_every, hooks=runtime.hooks
            )

    def emit(self, event: Event) -> None:
        """Give an event to all sinks; never waits."""
        for outlet in self._outlets:
            outlet(event)

    def start(self) -> None:
        """Start the threads of the sinks."""
        for outlet in self._outlets:
            outlet.start()

    def end(self, num_steps: int | None) -> None:
        """Have the sinks take what is left, after the steps of the run where this rank led it."""
        if num_steps is not None:
            self.emit(RunEnded(num_steps))
        close_all(self._outlets)


def lead(
    exchange: Exchange,
    planner: AbstractPlanner,
    settings: RunSettings,
    emit: Hook,
    *,
    hosts: Sequence[str],
    devices: Sequence[str],
    workers: Sequence[str],
) -> None:
    """Begin a run on rank 0: report it, restore what was learnt, and plan the first step."""
    emit(
        RunStarted(
            world_size=settings.job.world_size,
            global_batch_size=settings.job.global_batch_size,
            num_steps=settings.num_steps,
            policy=repr(settings.policy),
            hosts=tuple(hosts),
            devices=tuple(devices),
            versions=versions_here(),
        )
    )
    restored = settings.estimates.apply(planner, workers)
    if restored is not None:
        emit(restored)
    exchange.lead(planner)
