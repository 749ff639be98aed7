"""A run under way: opened at the first step, closed once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..control import Job, Plan, Planner
from ..events import Hook, RunEnded, RunStarted
from ..policies import AbstractPolicy
from ..telemetry import Fanout, JsonLines, ProgressLine
from ._clock import AbstractClock, CudaClock, HostClock, StepMeter
from ._conductor import StepConductor
from ._exchange import Exchange
from ._memory import CudaMemory, MemoryReader, NoMemory
from ._options import Runtime
from ._startup import Alone, SideGroup, WorkerFacts, describe_device, gather_facts, open_channel


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a run is opened with, all known before its first step.

    Attributes:
        policy: decides the sizes.
        job: what is planned for.
        num_steps: optimizer steps in an epoch.
        loss_reduction: ``"mean"`` or ``"sum"``.
        runtime: heartbeats, deadlines, the line for people.
        device: where this rank computes.
        memory: reads this rank's memory; None is the device's own reader.
        run_dir: folder for the events; None is nowhere.
    """

    policy: AbstractPolicy[Any]
    job: Job
    num_steps: int
    loss_reduction: str
    runtime: Runtime
    device: torch.device
    memory: MemoryReader | None
    run_dir: Path | None


class Run:
    """The open parts of a run on this rank. Collective: all ranks open one in the same step.

    Args:
        settings: what to open.
        side: the ranks.
        listeners: told of every plan.
    """

    def __init__(
        self,
        settings: RunSettings,
        side: SideGroup | Alone,
        listeners: Sequence[Callable[[Plan], None]],
    ) -> None:
        runtime, device = settings.runtime, settings.device
        # On every rank, though rank 0 alone uses it: what it refuses, all of them should hear.
        planner = Planner(settings.policy, settings.job)
        self._is_first = side.rank == 0
        self._files: list[JsonLines] = []
        self._emit = self._open_sinks(settings)
        late = device.type == "cuda" and runtime.freshness == "newest"
        facts = gather_facts(side, WorkerFacts.here(describe_device(device), lag=int(late)))
        lag = max(worker.lag for worker in facts)
        channel = open_channel(side, facts, runtime)
        self.exchange = Exchange(
            side.rank,
            [worker.host for worker in facts],
            channel,
            lag=lag,
            emit=self._emit,
            grace_s=3 * runtime.heartbeat_s,
        )
        for listener in listeners:
            self.exchange.subscribe(listener)
        settle = lag == 0 and side.world_size > 1
        self.conductor = StepConductor(
            self.exchange,
            StepMeter(_clock_of(device)),
            settings.memory or _memory_of(device),
            world_size=side.world_size,
            loss_reduction=settings.loss_reduction,
            settle_s=min(runtime.deadline_s + 2 * runtime.heartbeat_s, 10.0) if settle else 0.0,
            exact=runtime.freshness == "exact",
        )
        self.exchange.start()
        if self._is_first:
            self._lead(planner, settings, facts)

    def close(self) -> None:
        """Say goodbye to the others and close the files."""
        self.exchange.close()
        if self._is_first:
            self._emit(RunEnded(self.conductor.num_steps))
        for file in self._files:
            file.close()

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
        self.exchange.lead(planner)

    def _open_sinks(self, settings: RunSettings) -> Hook:
        if not self._is_first:
            return Fanout(())
        if settings.run_dir is not None:
            self._files.append(JsonLines(settings.run_dir / "events.jsonl"))
        every = settings.runtime.line_every
        line = [] if every is None else [ProgressLine(sys.stderr, every)]
        return Fanout((*self._files, *line, *settings.runtime.hooks))


def _clock_of(device: torch.device) -> AbstractClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


def _memory_of(device: torch.device) -> MemoryReader:
    return CudaMemory(device) if device.type == "cuda" else NoMemory()
