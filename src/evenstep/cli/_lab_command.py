"""``evenstep lab``: a script on a cluster of one machine, with slow CPUs and thin links."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn, TypeVar

import typer

from ..lab import Host, Lab, LabUnavailable, clean
from ..lab._host import Machine, check_machine
from ._common import fail, numbers, refused

Value = TypeVar("Value")


def lab(
    command: Annotated[
        list[str] | None, typer.Argument(help="The script and its arguments, after `--`.")
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option(help="Cores of each host, such as 0.8,0.6,0.3 (default: no quota)."),
    ] = None,
    mbit: Annotated[
        str | None,
        typer.Option(
            help="Mbit/s of each link, or up:down, such as 200,100:50 (default: not shaped)."
        ),
    ] = None,
    delay_ms: Annotated[
        float, typer.Option(help="Delay in ms of packets on their way out of a host; needs netem.")
    ] = 0.0,
    clean_: Annotated[
        bool, typer.Option("--clean", help="Remove the remains of labs that were killed, and exit.")
    ] = False,
) -> None:
    """Run a script with torchrun on hosts that this machine emulates. Linux and root only."""
    if clean_:
        _clean(command, cpus, mbit)
        return
    try:
        if not command:
            remedy = "End with `-- script.py --its-option`, or give `--clean`."
            raise refused("lab", "SCRIPT", "be given", "nothing", remedy)
        hosts = _hosts(cpus, mbit)
        cluster = Lab(hosts, delay_ms=delay_ms)
        if not command[0].startswith("-") and not Path(command[0]).exists():
            remedy = "Give its path from the current folder, in which it runs."
            raise refused("lab", "SCRIPT", "be a file", command[0], remedy)
    except ValueError as error:
        fail(str(error), 2)
    raise typer.Exit(_run(cluster, command))


def _run(cluster: Lab, command: Sequence[str]) -> int:
    """Run the script, and leave nothing of the lab however it ends."""
    try:
        with _stopped_once(), cluster as running:
            typer.echo(f"lab {running.run_id}: {_in_words(cluster.hosts)}", err=True)
            return running.torchrun(command, tell=typer.echo)
    except LabUnavailable as error:
        fail(str(error), 1)
    except ValueError as error:
        fail(str(error), 2)
    except OSError as error:
        fail(f"{error}. What was made is removed, or `evenstep lab --clean` does it.", 1)
    except KeyboardInterrupt:
        fail("Stopped; the hosts and all that ran on them are gone.", 130)


def _clean(*others: object) -> None:
    """Remove what is left of labs, and say what it was."""
    if any(others):
        remedy = "It removes what is left and ends."
        fail(str(refused("lab", "--clean", "stand alone", "more", remedy)), 2)
    try:
        check_machine(Machine.here())
        found = clean()
    except LabUnavailable as error:
        fail(str(error), 1)
    except (OSError, ValueError) as error:
        fail(f"Something could not be removed: {error}", 1)
    for each in found:
        name = f"lab {each.run_id} of process {each.pid}"
        if each.is_running:
            typer.echo(f"{name} is running and was left alone")
        else:
            typer.echo(
                f"{name}, which is gone: {each.num_hosts} hosts removed, "
                f"{each.num_killed} processes ended"
            )
    if not found:
        typer.echo("no lab has left anything")


def _hosts(cpus: str | None, mbit: str | None) -> list[Host]:
    """Return the hosts: as many as the longer list has."""
    quotas = None if cpus is None else numbers("lab", "--cpus", cpus)
    rates = None if mbit is None else _rates(mbit)
    count = max(len(quotas or ()), len(rates or ()))
    if not count:
        remedy = "An example is --mbit 200,200,50; it also gives the number of hosts."
        raise refused("lab", "--cpus, --mbit", "be given, one of the two", "neither", remedy)
    each = zip(_each("--cpus", quotas, count), _each("--mbit", rates, count), strict=True)
    return [Host(cpus=quota, mbit=rate) for quota, rate in each]


def _each(option: str, values: Sequence[Value] | None, count: int) -> Sequence[Value | None]:
    """Return one value for each host; a single one stands for all, and None is not limited."""
    if values is None or len(values) == 1:
        return [None if values is None else values[0]] * count
    if len(values) != count:
        rule = f"hold one number, or one for each of the {count} hosts"
        raise refused("lab", option, rule, f"{len(values)} of them", "Leave none out.")
    return values


def _rates(text: str) -> list[float | tuple[float, float]]:
    try:
        return [_rate(part) for part in text.split(",")]
    except ValueError as error:
        rule = "be numbers with commas between, or up:down"
        remedy = "An example is 200,200,100:50."
        raise refused("lab", "--mbit", rule, repr(text), remedy) from error


def _rate(text: str) -> float | tuple[float, float]:
    """Return the rate written as ``200`` or, up and down, ``200:50``."""
    numbers = [float(part) for part in text.split(":")]
    if len(numbers) == 1:
        return numbers[0]
    up, down = numbers
    return up, down


def _in_words(hosts: Sequence[Host]) -> str:
    """Return what each host has, in a line."""
    each = []
    for host in hosts:
        quota = "any" if host.cpus is None else f"{host.cpus:g}"
        rate = host.mbit
        link = "any" if rate is None else ":".join(f"{way:g}" for way in dict.fromkeys(rate))
        each.append(f"{quota} CPU {link} Mbit/s")
    return f"{len(hosts)} hosts, {', '.join(each)}"


@contextmanager
def _stopped_once() -> Iterator[None]:
    """Let each of the usual signals end what runs; a second one cannot hurry the removal."""
    kinds = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` has it
        kinds.append(signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for kind in kinds:
            signal.signal(kind, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {kind: signal.signal(kind, stop) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
