"""What the environment says of this process: its torchrun, its role, and how to end the former."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROLE, SWITCH, OFF = "EVENSTEP_ROLE", "EVENSTEP", "off"
_TORCHRUN = "pt_elastic"  # as the process calls itself that runs torch.distributed.run


def role_in(environment: Mapping[str, str]) -> str:
    """Return the role that the environment gives this process, unchecked: a worker by default.

    Unchecked, because all ranks have to hear of one that is none.
    """
    return environment.get(ROLE, "") or "worker"


def switch_in(environment: Mapping[str, str]) -> str:
    """Return whether the environment leaves the script plain, unchecked: "on" by default."""
    return environment.get(SWITCH, "") or "on"


def is_off() -> bool:
    """Return whether the environment leaves scripts plain."""
    return switch_in(os.environ) == OFF


@dataclass(frozen=True, slots=True)
class Agent:
    """The torchrun that started a worker.

    Attributes:
        num_workers: its workers; 0 where this process is no child of a torchrun.
        num_restarts: how often it will still start them anew.
    """

    num_workers: int
    num_restarts: int

    @classmethod
    def of(cls, environment: Mapping[str, str], *, has_torchrun: bool) -> Self:
        """Return what the environment says.

        Args:
            environment: variables, which a program between torchrun and this process has as well.
            has_torchrun: whether the parent of this process is a torchrun.
        """
        if "TORCHELASTIC_RUN_ID" not in environment:
            return cls(0, 0)
        most = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        done = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        beside = int(environment.get("LOCAL_WORLD_SIZE", "1")) if has_torchrun else 0
        return cls(beside, most - done)


def is_torchrun(process_id: int, *, processes: Path = Path("/proc")) -> bool:
    """Tell whether a process is a torchrun, or another launcher that runs torch's as its own.

    By the name that torch gives the process: environment variables are handed on to every program
    that it starts. False where the system does not say (it has no ``/proc``: not Linux), and for
    programs that call torch's ``elastic_launch`` themselves, which keep their own name.
    """
    try:
        return (processes / str(process_id) / "comm").read_text().strip() == _TORCHRUN
    except OSError:
        return False


def end_agent() -> None:
    """End the agent of this process, its parent: its node leaves, the others meet without it.

    Nothing is left to do if the parent is no torchrun: it has ended, and the process was handed to
    another parent, such as a container's first process.
    """
    parent = os.getppid()
    if is_torchrun(parent):
        os.kill(parent, signal.SIGTERM)
