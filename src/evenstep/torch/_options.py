"""How a balanced run is watched: heartbeats, deadlines, the line for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .._run._machine_reader import MachineReader
from .._run._runtime import AbstractRuntime
from ..exceptions import invalid
from ..planner.claims import Hybrid
from ._memory._memory import MemoryReader


@dataclass(frozen=True, slots=True)
class Runtime(AbstractRuntime):
    """Settings of the machinery around the steps; the defaults suit most runs.

    Args:
        deadline_s: seconds without a heartbeat after which a worker counts as lost and the others
            end with an error that names it. More than the longest time for which a process may
            hold Python's lock, as some compilers do.
        heartbeat_s: seconds between two heartbeats, positive and at most a third of
            ``deadline_s``.
        hang_s: seconds for which a worker may keep the others waiting although its process lives;
            then it counts as hanging. A pause that all workers share is none, however long. More
            than the longest step, and than what one worker does alone outside of
            ``Balancer.pause()``; the default is a minute short of the ten after which NCCL ends
            a process without saying who was late. None is any time.
        line_every: steps between two lines for people on standard error, from rank 0; None is
            silence.
        freshness: ``"newest"`` never waits for a device: the newest measurement that is complete
            decides, which is the last step on a CPU and often the one before on CUDA.
            ``"exact"`` waits for the device at every step, so that step k always decides k + 1.
        run_dir: folder for ``events.jsonl``, written by rank 0; None writes none.
        hooks: called with every event on rank 0, each in a thread of its own, such as ``wandb`` or
            a dashboard. One that raises or is slow loses events and stops nothing.
        address: host name or address of rank 0 that every other rank can reach, or one of its
            network interfaces, such as ``"ib0"``. None is to find one: the loopback where all
            ranks share a network, else the interface in ``GLOO_SOCKET_IFNAME``, else
            ``MASTER_ADDR`` and the host's own names.
        ports: the TCP port at which rank 0 listens for the other ranks, or a ``range`` whose first
            free one it takes; None is any port that is free. Nothing else of evenstep listens.
        memory: reads this rank's memory, so that no plan exceeds what fits: anything with the
            methods of ``MemoryReader``. None reads the CUDA device, and nothing on a CPU.
        machine: reads what this rank's machine has to spare, for policies that foresee speeds by
            it: anything with the methods of ``MachineReader``. None asks psutil, and only where
            the policy wants to know.
        claims: in loops over ``loader.steps()``, whether ranks begin each step with a part of what
            was planned for them and claim the rest as they go. ``"auto"``, with the policy
            ``"auto"`` alone: while that is faster. A ``Hybrid``: always, in its way. ``"off"``:
            never.

    Raises:
        ValueError: a number is out of range.
    """

    freshness: Literal["newest", "exact"] = "newest"
    memory: MemoryReader | None = None
    machine: MachineReader | None = None
    claims: Literal["auto", "off"] | Hybrid = "auto"

    def __post_init__(self) -> None:
        self.check_watch()
        if self.freshness not in ("newest", "exact"):
            raise invalid(
                "Runtime(freshness=...)",
                'be "newest" or "exact"',
                repr(self.freshness),
                'Use "newest" unless every step must decide the very next.',
            )
        if not (isinstance(self.claims, Hybrid) or self.claims in ("auto", "off")):
            raise invalid(
                "Runtime(claims=...)",
                'be "auto", "off" or a `Hybrid`',
                repr(self.claims),
                '"auto" claims while that is faster.',
            )
