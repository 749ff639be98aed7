"""What the environment says of this process: its torchrun, its role, and how to end the former."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

ROLE, SWITCH, OFF = "EVENSTEP_ROLE", "EVENSTEP", "off"


def role_in(environment: Mapping[str, str]) -> str:
    """Return the role that the environment gives this process, unchecked: a worker by default.

    Unchecked, because all ranks have to hear of one that is none.
    """
    return environment.get(ROLE, "") or "worker"


def switch_in(environment: Mapping[str, str]) -> str:
    """Return whether the environment leaves the script plain, unchecked: "on" by default."""
    return environment.get(SWITCH, "") or "on"


@dataclass(frozen=True, slots=True)
class Agent:
    """The torchrun that started a worker.

    Attributes:
        num_workers: its workers; 0 where no torchrun has started this process.
        num_restarts: how often it will still start them anew.
    """

    num_workers: int
    num_restarts: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Return what the environment says."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return cls(0, 0)
        most = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        done = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(int(environment.get("LOCAL_WORLD_SIZE", "1")), most - done)


def end_agent() -> None:
    """End the agent of this process, its parent: its node leaves, the others meet without it."""
    os.kill(os.getppid(), signal.SIGTERM)
