"""What the environment says of this process: its role, and whether it is balanced."""

from __future__ import annotations

import os
from collections.abc import Mapping

ROLE, SWITCH, OFF = "EVENSTEP_ROLE", "EVENSTEP", "off"


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
