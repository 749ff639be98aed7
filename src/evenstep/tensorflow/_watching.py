"""How a balanced run is watched: heartbeats, the deadline, the progress line."""

from __future__ import annotations

from dataclasses import dataclass

from .._run._runtime import AbstractRuntime
from ..exceptions import invalid


@dataclass(frozen=True, slots=True)
class Runtime(AbstractRuntime):
    """How a run is watched, connected and recorded; the defaults suit most runs.

    Settings that ``evenstep.torch.Runtime`` also has mean the same here.

    Args:
        deadline_s: seconds without a heartbeat after which a worker counts as lost and the others
            end with an error that names it.
        heartbeat_s: seconds between two heartbeats, positive and at most a third of
            ``deadline_s``.
        hang_s: seconds for which a worker may make the others wait in a step while its process
            lives, before it counts as lost. It has to be longer than the longest pause that one
            worker makes alone. None waits for ever.
        line_every: steps between two progress lines on standard error, from rank 0; None is
            silence.
        run_dir: folder for ``events.jsonl``, written by rank 0; None writes none.
        hooks: called with every event on rank 0, each in a thread of its own.
        address: host name or address of rank 0 that every other rank can reach, or one of its
            network interfaces; None takes the address that the strategy itself uses for rank 0.
        ports: the TCP port at which rank 0 listens for the other ranks, or a ``range`` of which it
            takes the first free port; None is any free port.
        meeting_s: seconds within which all workers have to reach their first step.

    Raises:
        ValueError: a number is out of range.
    """

    meeting_s: float = 300.0

    def __post_init__(self) -> None:
        self.check_watch()
        if not self.meeting_s > 0:
            raise invalid(
                "Runtime(meeting_s=...)",
                "be positive",
                self.meeting_s,
                "Give as long as the slowest worker takes to its first step.",
            )
