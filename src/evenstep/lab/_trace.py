"""How links and quotas change while a lab runs, as a plain value."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, final

import numpy as np

from .._whole_file import write_whole
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
        if not (math.isfinite(at_s) and at_s >= 0):
            raise invalid("Change(at_s=...)", "be finite and at least 0", at_s, "Count from 0.")
        if not 0 <= host < MAX_HOSTS:
            rule = f"be from 0 to {MAX_HOSTS - 1}"
            raise invalid("Change(host=...)", rule, host, "Count the hosts from 0.")
        if mbit is None and cpus is None:
            argument = "Change(mbit=..., cpus=...)"
            raise invalid(argument, "be given, one at least", "none", "Leave the change out.")
        object.__setattr__(self, "at_s", float(at_s))
        object.__setattr__(self, "host", int(host))
        rate = None if mbit is None else rate_of("Change(mbit=...)", mbit)
        object.__setattr__(self, "mbit", rate)
        quota = None if cpus is None else cpus_of("Change(cpus=...)", cpus)
        object.__setattr__(self, "cpus", quota)


@final
@dataclass(frozen=True, slots=True, init=False)
class Trace:
    """Changes in the order of their times; what has the same time is done in the order given.

    Args:
        changes: at least one, sorted by ``at_s``.

    Raises:
        ValueError: there is none, or one is earlier than the one before it.
    """

    changes: tuple[Change, ...]

    def __init__(self, changes: Iterable[Change]) -> None:
        given = tuple(changes)
        if not given:
            raise invalid("Trace(changes=...)", "hold at least one change", "none", "Leave it out.")
        for before, after in pairwise(given):
            if after.at_s < before.at_s:
                got = f"{after.at_s:g} s after {before.at_s:g} s"
                raise invalid("Trace(changes=...)", "be sorted by time", got, "Sort them.")
        object.__setattr__(self, "changes", given)

    @property
    def num_hosts(self) -> int:
        """The least number of hosts that has all that are named."""
        return 1 + max(change.host for change in self.changes)

    def check(self, num_hosts: int) -> None:
        """Raise unless a lab of so many hosts has all that are named."""
        if self.num_hosts > num_hosts:
            rule = f"name hosts below {num_hosts}, as many as the lab has"
            raise invalid("Trace(changes=...)", rule, self.num_hosts - 1, "Count from 0.")


def drawn_trace(
    num_hosts: int,
    duration_s: float,
    *,
    seed: int,
    every_s: float = 20.0,
    least_mbit: float = 20.0,
    most_mbit: float = 155.0,
) -> Trace:
    """Return links whose rates are redrawn again and again, evenly between two bounds.

    Every host gets a rate of its own at 0, ``every_s``, ... below ``duration_s``, the same both
    ways. The defaults are the range of public tests of aggregation on changing networks, redrawn
    more often. The same arguments give the same trace.

    Args:
        num_hosts: at least 1.
        duration_s: how long it goes on, above 0.
        seed: of the generator.
        every_s: between two draws, above 0.
        least_mbit, most_mbit: bounds, in Mbit/s.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 1 <= num_hosts <= MAX_HOSTS:
        rule = f"be from 1 to {MAX_HOSTS}"
        raise invalid("drawn_trace(num_hosts=...)", rule, num_hosts, "Say how many there are.")
    for name, value in (("duration_s", duration_s), ("every_s", every_s)):
        if not (math.isfinite(value) and value > 0):
            raise invalid(f"drawn_trace({name}=...)", "be positive", value, "Give seconds.")
    least, most = rate_of("drawn_trace(least_mbit=..., most_mbit=...)", (least_mbit, most_mbit))
    if most < least:
        rule = f"be at least `least_mbit`, {least:g}"
        raise invalid("drawn_trace(most_mbit=...)", rule, most, "Swap the two.")
    generator = np.random.default_rng(seed)
    times = [every_s * index for index in range(math.ceil(duration_s / every_s))]
    rates = generator.uniform(least, most, size=(len(times), num_hosts)).round(1)
    return Trace(
        Change(at_s, host, mbit=float(rates[index, host]))
        for index, at_s in enumerate(times)
        for host in range(num_hosts)
    )


NEEDED = ("seconds", "host", "mbit")
COLUMNS = (*NEEDED, "cpus")


def read_trace(path: str | Path) -> Trace:
    """Return the trace of a CSV file with the columns ``seconds,host,mbit`` and perhaps ``cpus``.

    Seconds count from the beginning and ascend; hosts count from 0. ``mbit`` is one number for both
    ways, or ``up:down``. An empty cell leaves that part of the host as it is.

        seconds,host,mbit,cpus
        0,0,200,0.8
        0,1,100:50,
        30,0,,0.4

    Raises:
        ValueError: the file is no such table; the message names the line.
        OSError: the file cannot be read.
    """
    file = Path(path)
    changes: list[Change] = []
    try:
        for line, cells in _rows(file):
            change = _change(file, line, cells)
            if changes and change.at_s < changes[-1].at_s:
                got = f"{change.at_s:g} s after {changes[-1].at_s:g} s"
                _refuse(file, line, "be sorted by seconds", got, "Sort the file.")
            changes.append(change)
    except UnicodeDecodeError as error:
        got = f"{file.name}: {error}"
        raise invalid("read_trace(path=...)", "be text in UTF-8", got, "Convert it.") from error
    if not changes:
        _refuse(file, 1, "hold at least one row", "none", "Write a change.")
    return Trace(changes)


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write what ``read_trace`` reads; a file in the way is replaced, whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for change in trace.changes:
        rate = "" if change.mbit is None else ":".join(map(repr, change.mbit))
        quota = "" if change.cpus is None else repr(change.cpus)
        writer.writerow((repr(change.at_s), change.host, rate, quota))
    write_whole(Path(path), [text.getvalue()])


def parse_mbit(text: str) -> float | tuple[float, float]:
    """Return the rate written as ``200`` or, up and down, ``200:50``.

    Raises:
        ValueError: it is neither.
    """
    numbers = [float(part) for part in text.split(":")]
    if len(numbers) == 1:
        return numbers[0]
    up, down = numbers
    return up, down


def _rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(file, header)
            for cells in reader:
                if not cells:
                    continue
                if len(cells) != len(header):
                    rule = f"hold {len(header)} values in every row"
                    _refuse(file, reader.line_num, rule, len(cells), "Leave a cell empty instead.")
                yield reader.line_num, dict(zip(header, map(str.strip, cells), strict=True))
        except csv.Error as error:
            _refuse(file, reader.line_num, "be CSV", f"{error}", "Quote nothing.")


def _check_header(file: Path, header: list[str]) -> None:
    known = set(header) <= set(COLUMNS) and set(NEEDED) <= set(header)
    if not known or len(set(header)) < len(header):
        rule = f"have the columns {','.join(NEEDED)} and perhaps cpus, each once"
        got = ",".join(header) or "nothing"
        _refuse(file, 1, rule, got, "Write them in the first line.")


def _change(file: Path, line: int, cells: dict[str, str]) -> Change:
    """Return the change that a row tells; what its fields refuse is refused with the line."""
    host, rate, quota = cells["host"], cells["mbit"], cells.get("cpus", "")
    if not host.isdecimal():
        _refuse(file, line, "give 'host' as a whole number from 0", repr(host), "Count the hosts.")
    try:
        seconds = float(cells["seconds"])
        mbit = parse_mbit(rate) if rate else None
        cpus = float(quota) if quota else None
    except ValueError:
        got = ",".join(cells.values())
        _refuse(file, line, "hold numbers, and `up:down` in 'mbit'", got, "Leave out units.")
    try:
        return Change(seconds, int(host), mbit=mbit, cpus=cpus)
    except ValueError as error:
        raise ValueError(f"Line {line} of {file.name}: {error}") from error


def _refuse(file: Path, line: int, rule: str, got: object, remedy: str) -> NoReturn:
    raise invalid("read_trace(path=...)", rule, f"{got} in line {line} of {file.name}", remedy)
