"""What a machine needs for a lab, and what a host of it may use: CPU and link, as plain values."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple, final

from .._install import install_line
from .._types import check_range
from ..exceptions import invalid


class LabUnavailable(RuntimeError):
    """This machine, or this user, cannot make a lab; the message holds the remedy."""


def check_machine() -> None:
    """Raise unless a lab can be made here.

    Raises:
        LabUnavailable: with what to do about it.
    """
    system = platform.system()
    if system != "Linux":
        message = (
            f"A lab is made of Linux network namespaces and control groups; this is "
            f"{system or 'an unknown system'}. Run it on Linux, in a virtual machine say; "
            f"`evenstep demo` and `evenstep simulate` run anywhere."
        )
        raise LabUnavailable(message)
    if os.geteuid() != 0:
        message = (
            "A lab makes network namespaces and control groups, which takes root. Run it with "
            "`sudo`, or in a container started with `docker run --privileged`."
        )
        raise LabUnavailable(message)
    if find_spec("pyroute2") is None:
        raise LabUnavailable(f"A lab needs pyroute2: `{install_line('lab')}`.")


MAX_HOSTS = 250
_LEAST_MBIT, _MOST_MBIT = 0.1, 10_000.0
_LEAST_CPUS = 0.1


class Rate(NamedTuple):
    """What a link carries, in Mbit/s (1e6 bits, headers included).

    Attributes:
        up_mbit: from the host to the others.
        down_mbit: from the others to the host.
    """

    up_mbit: float
    down_mbit: float


@final
@dataclass(frozen=True, slots=True, init=False)
class Host:
    """One host of a lab.

    Args:
        cpus: CPU time of all its processes together, in cores, at least 0.1 and finite; None is no
            quota. A quota is an upper limit: it does not reserve CPU time.
        mbit: bandwidth of its link in Mbit/s, one number for both directions or ``(up, down)``,
            from 0.1 to 10,000; None does not shape it.

    Attributes:
        cpus: as above.
        mbit: both ways, or None.

    Raises:
        ValueError: an argument is out of range.
    """

    cpus: float | None
    mbit: Rate | None

    def __init__(
        self, *, cpus: float | None = None, mbit: float | tuple[float, float] | None = None
    ) -> None:
        object.__setattr__(self, "cpus", None if cpus is None else cpus_of("Host(cpus=...)", cpus))
        object.__setattr__(self, "mbit", None if mbit is None else rate_of("Host(mbit=...)", mbit))


def cpus_of(argument: str, value: float) -> float:
    """Return a quota in cores, checked."""
    remedy = "The kernel counts in 1 ms of each period of 10 ms; None takes what is free."
    check_range(argument, value, f"finite and at least {_LEAST_CPUS}", remedy)
    return float(value)


def rate_of(argument: str, value: float | Sequence[float]) -> Rate:
    """Return a rate of both ways, checked; one number stands for both."""
    both = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(both) != 2 or not all(_LEAST_MBIT <= each <= _MOST_MBIT for each in both):
        rule = f"be from {_LEAST_MBIT:g} to {_MOST_MBIT:g} Mbit/s, one number or (up, down)"
        raise invalid(argument, rule, value, "None does not shape the link.")
    return Rate(float(both[0]), float(both[1]))


def check_cores(hosts: Sequence[Host], num_cores: int) -> str | None:
    """Return what to warn of: quotas that this machine cannot keep all at once.

    Raises:
        ValueError: a host alone asks for more cores than there are.
    """
    asked = [host.cpus for host in hosts if host.cpus is not None]
    if asked and max(asked) > num_cores:
        rule = f"be at most {num_cores}, the cores of this machine"
        raise invalid("Host(cpus=...)", rule, max(asked), "Ask for less, or None.")
    if sum(asked) > num_cores:
        return (
            f"The hosts of this lab ask for {sum(asked):g} cores together, and the machine has "
            f"{num_cores}: when all compute at once, they get less. Scale `cpus` down."
        )
    return None
