"""How links and quotas change while a lab runs, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from .._types import check_range
from ..exceptions import invalid
from ._host import MAX_HOSTS, Rate, cpus_of, rate_of


@final
@dataclass(frozen=True, slots=True, init=False)
class Change:
    """What becomes of one host at one moment.

    Args:
        at_s: seconds from the beginning of the trace, finite and at least 0.
        host: which one, from 0.
        mbit: its link from then on, as for ``Host``; None leaves it.
        cpus: its quota from then on, as for ``Host``; None leaves it.

    Attributes:
        at_s, host, cpus: as above.
        mbit: both ways, or None.

    Raises:
        ValueError: an argument is out of range, or nothing changes.
    """

    at_s: float
    host: int
    mbit: Rate | None
    cpus: float | None

    def __init__(
        self,
        at_s: float,
        host: int,
        *,
        mbit: float | tuple[float, float] | None = None,
        cpus: float | None = None,
    ) -> None:
        check_range("Change(at_s=...)", at_s, "finite and at least 0", "Count from 0.")
        check_range("Change(host=...)", host, f"in [0, {MAX_HOSTS - 1}]", "Hosts count from 0.")
        if mbit is None and cpus is None:
            argument = "Change(mbit=..., cpus=...)"
            raise invalid(argument, "be given, one at least", "none", "Leave the change out.")
        object.__setattr__(self, "at_s", float(at_s))
        object.__setattr__(self, "host", int(host))
        rate = None if mbit is None else rate_of("Change(mbit=...)", mbit)
        object.__setattr__(self, "mbit", rate)
        quota = None if cpus is None else cpus_of("Change(cpus=...)", cpus)
        object.__setattr__(self, "cpus", quota)


def drawn_trace(
    num_hosts: int,
    duration_s: float,
    *,
    seed: int,
    every_s: float = 20.0,
    least_mbit: float = 20.0,
    most_mbit: float = 155.0,
) -> tuple[Change, ...]:
    """Return links whose rates are redrawn again and again, evenly between two bounds.

    Every host gets a rate of its own at 0, ``every_s``, ... below ``duration_s``, the same both
    ways. The defaults are the range of public tests of aggregation on changing networks, redrawn
    more often. The same arguments give the same trace.

    Args:
        num_hosts: at least 1.
        duration_s: how long it lasts, above 0.
        seed: of the generator.
        every_s: between two draws, above 0.
        least_mbit, most_mbit: bounds, in Mbit/s.

    Raises:
        ValueError: an argument is out of range.
    """
    rule = f"in [1, {MAX_HOSTS}]"
    check_range("drawn_trace(num_hosts=...)", num_hosts, rule, "Say how many there are.")
    for name, value in (("duration_s", duration_s), ("every_s", every_s)):
        check_range(f"drawn_trace({name}=...)", value, "finite and positive", "Give seconds.")
    least, most = rate_of("drawn_trace(least_mbit=..., most_mbit=...)", (least_mbit, most_mbit))
    if most < least:
        rule = f"be at least `least_mbit`, {least:g}"
        raise invalid("drawn_trace(most_mbit=...)", rule, most, "Swap the two.")
    generator = np.random.default_rng(seed)
    times = [every_s * index for index in range(math.ceil(duration_s / every_s))]
    rates = generator.uniform(least, most, size=(len(times), num_hosts)).round(1)
    return tuple(
        Change(at_s, host, mbit=float(rates[index, host]))
        for index, at_s in enumerate(times)
        for host in range(num_hosts)
    )
