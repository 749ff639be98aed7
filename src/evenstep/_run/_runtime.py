"""What a run is opened with in every framework, where its ranks meet, what it reports of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from .._exchange._channel import StarChannel
from .._exchange._exchange import Exchange
from .._exchange._meeting import connect_star
from .._planner import AbstractPlanner, Job
from .._telemetry import Outlet, close_all, open_outlets, versions_here
from ..events import Event, Hook, RunEnded, RunStarted
from ..exceptions import invalid
from ..policies import AbstractPolicy, by_name
from ..policies._base import check_policy
from ._estimates import Estimates


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


class AllRanks(Protocol):
    """All ranks, servers included, while a framework's own means connect them alone."""

    rank: int
    world_size: int

    def share(self, value: Any) -> Any:
        """Return on every rank what rank 0 was called with."""

    def collect(self, value: Any) -> list[Any]:
        """Return on every rank what each rank was called with, in order."""


def open_channel(
    ranks: AllRanks,
    runtime: AbstractRuntime,
    addresses: Sequence[str],
    *,
    timeout_s: float = 60.0,
) -> StarChannel | None:
    """Connect every rank with rank 0; None with one process. Collective."""
    if ranks.world_size == 1:
        return None
    peers = connect_star(
        ranks.rank,
        ranks.world_size,
        ranks.share,
        collect=ranks.collect,
        addresses=addresses if runtime.address is None else [runtime.address],
        ports=runtime.listening_ports,
        timeout_s=timeout_s,
    )
    return StarChannel(peers, heartbeat_s=runtime.heartbeat_s, deadline_s=runtime.deadline_s)


def checked_policy(policy: Any) -> AbstractPolicy[Any]:
    """Return the policy, or the one of that name."""
    if isinstance(policy, str):
        return by_name(policy)
    check_policy("Balancer(policy=...)", policy, rule="be a name, 'module:Class', or a policy")
    return policy  # type: ignore[no-any-return]


def checked_reduction(loss_reduction: Any) -> Literal["mean", "sum"]:
    """Return what the loss does over the units of a forward, if it is one of the two."""
    if loss_reduction not in ("mean", "sum"):
        raise invalid(
            "Balancer(loss_reduction=...)",
            'be "mean" or "sum"',
            repr(loss_reduction),
            "Say what the loss does over the samples of a batch.",
        )
    return loss_reduction  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class AbstractRuntime:
    """The settings of every framework's ``Runtime``, which explains them."""

    deadline_s: float = 60.0
    heartbeat_s: float = 1.0
    hang_s: float | None = 540.0
    line_every: int | None = 50
    run_dir: str | Path | None = None
    hooks: tuple[Hook, ...] = ()
    address: str | None = None
    ports: int | range | None = None

    def _check_seconds(self) -> None:
        for name in ("deadline_s", "heartbeat_s", "hang_s"):
            value = getattr(self, name)
            is_none = value is None and name == "hang_s"
            if not (is_none or (isinstance(value, int | float) and value > 0)):
                rule = "be a positive number of seconds" + ", or None" * (name == "hang_s")
                raise invalid(f"Runtime({name}=...)", rule, repr(value), "Leave it out.")

    def check_watch(self) -> None:
        """Raise unless a run can be watched and reached so.

        Raises:
            ValueError: a number is out of range.
        """
        self._check_seconds()
        if not self.heartbeat_s <= self.deadline_s / 3:
            raise invalid(
                "Runtime(heartbeat_s=...)",
                f"be at most a third of deadline_s, {self.deadline_s / 3:g}",
                self.heartbeat_s,
                "Raise `deadline_s`, or lower it.",
            )
        if self.hang_s is not None and not self.hang_s >= 3 * self.heartbeat_s:
            raise invalid(
                "Runtime(hang_s=...)",
                f"be at least three times heartbeat_s, {3 * self.heartbeat_s:g}, or None",
                self.hang_s,
                "Give more than the longest step.",
            )
        if self.line_every is not None and self.line_every < 1:
            raise invalid(
                "Runtime(line_every=...)",
                "be at least 1, or None",
                self.line_every,
                "Use None for no line at all.",
            )
        if not (isinstance(self.hooks, tuple | list) and all(map(callable, self.hooks))):
            raise invalid(
                "Runtime(hooks=...)",
                "be a tuple of functions of an event",
                repr(self.hooks),
                "Give `(function,)` for a single one, and leave it out for none.",
            )
        ports = self.listening_ports
        if self.ports is not None and not (ports and min(ports) >= 1 and max(ports) <= 65535):
            raise invalid(
                "Runtime(ports=...)",
                "be a port from 1 to 65535, a `range` of them, or None",
                repr(self.ports),
                "Give `29600` or `range(29600, 29700)`; None takes any port that is free.",
            )

    @property
    def listening_ports(self) -> Sequence[int]:
        """The ports that rank 0 may listen at; 0 alone is any."""
        if self.ports is None:
            return (0,)
        if isinstance(self.ports, range):
            return self.ports
        return (self.ports,) if type(self.ports) is int else ()
