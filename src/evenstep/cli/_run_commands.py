"""Commands with a run: ``doctor``, ``demo``, ``lab``, ``watch``, ``top`` and ``report``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from .. import __version__
from .._install import install_line
from .._report import ReportFigures, page, read_figures
from .._telemetry._event_lines import events_file
from .._top import FileSource, Source, StreamSource, TopView
from .._top import watch as follow
from .._top._run_sources import quit_key
from .._whole_file import write_whole
from ..lab import Host, Lab, LabUnavailable, clean
from ..lab._host import check_machine
from ..policies import by_name
from ._common import (
    check_ends,
    fail,
    import_from_here,
    least,
    numbers,
    refused,
    spare,
    spread,
    unread,
    unwritten,
    within,
)


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
            return running.torchrun(command, write=typer.echo)
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
        check_machine()
        found = clean()
    except LabUnavailable as error:
        fail(str(error), 1)
    except (OSError, ValueError) as error:
        fail(f"Something could not be removed: {error}", 1)
    for lab, num_killed in found:
        name = f"lab {lab.run_id} of process {lab.pid}"
        if num_killed is None:
            typer.echo(f"{name} is running and was left alone")
        else:
            ended = f"{lab.num_hosts} hosts removed, {num_killed} processes ended"
            typer.echo(f"{name}, which is gone: {ended}")
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
    each_cpus = spread("lab", "--cpus", quotas or (None,), count, of="hosts")
    each_rate = spread("lab", "--mbit", rates or (None,), count, of="hosts")
    return [Host(cpus=cpus, mbit=rate) for cpus, rate in zip(each_cpus, each_rate, strict=True)]


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


def doctor(
    nproc_per_node: Annotated[
        int | None,
        typer.Option(help="Ranks to start on this machine (default: one per GPU, or 1)."),
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="Your own step: MODULE:FUNCTION or FILE.py:FUNCTION.")
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(help="Samples per step of all ranks (default: 32 per rank, 512 on GPUs)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write, for `evenstep plan --doctor`.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say in a minute what is wrong with machines and links, and what plain training wastes.

    It starts the ranks of this machine. On several machines, start it on each as your training:
    `torchrun --nnodes 2 ... -m evenstep.doctor`, with the same options.
    """
    try:
        import torch

        from ..doctor._command_line import main, parsed
    except ModuleNotFoundError as error:
        fail(f"`evenstep doctor` needs {error.name}: `{install_line('torch')}`.", 1)
    options = {"--step": step, "--global-batch-size": global_batch_size, "--out": out}
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    words += ["--json"] if json else []
    if "RANK" in os.environ:  # under torchrun already
        raise typer.Exit(main(words))
    try:
        ranks = max(1, torch.cuda.device_count()) if nproc_per_node is None else nproc_per_node
        within("doctor", "--nproc-per-node", ranks, 1, 1024, "Each is a process; 1 looks at one.")
        total = ranks if global_batch_size is None else global_batch_size
        least("doctor", "--global-batch-size", total, ranks, "Every rank computes a sample.")
        parsed(words)  # torchrun would report an error by its own traceback
    except ValueError as error:
        fail(str(error), 2)
    if ranks == 1:
        raise typer.Exit(main(words))
    # localhost: the machine's own name need not resolve, on a laptop say.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    command = [sys.executable, *torchrun, f"--nproc-per-node={ranks}", "-m", "evenstep.doctor"]
    raise typer.Exit(subprocess.run([*command, *words], check=False).returncode)


_NEEDED = ("torch", "matplotlib")
_MOST_WORKERS = 256


def demo(
    speeds: Annotated[str, typer.Option(help="Emulated speeds, one per worker.")] = "1,1/2,1/3,1/6",
    policy: Annotated[
        str,
        typer.Option(
            help="The balanced run's policy: a name, or module:Class (also in this folder)."
        ),
    ] = "auto",
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each run (default: as many as fit in about a minute)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for picture, figures and events.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train a small GPT with equal shares, then balanced, and show the difference."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        fail(f"The demo needs {' and '.join(missing)}: `{install_line('demo')}`.", 1)

    from ..demo._run_demo import RUNS, DemoFailed, run_demo
    from ..demo._worker import DemoJob

    if ":" in policy:
        import_from_here()
    try:
        given = numbers("demo", "--speeds", speeds)
        if not 2 <= len(given) <= _MOST_WORKERS:
            rule, remedy = f"name 2 to {_MOST_WORKERS} workers", "Write 1,1/2,1/3 say."
            raise refused("demo", "--speeds", rule, len(given), remedy)
        if steps is not None:
            least("demo", "--steps", steps, 10, "Fewer show nothing.")
        by_name(policy)
        _check_out(out, RUNS)
    except ValueError as error:
        fail(str(error), 2)

    # `with` ends the workers on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run_demo(DemoJob(policy, given, steps), out, Console())
    except DemoFailed as error:
        fail(str(error), 1)
    except OSError as error:  # a folder that cannot be written, or a full disk
        got = f"{error.filename or out} ({error.strerror or error})"
        remedy = "Give another one: `--out runs/demo`."
        fail(str(refused("demo", "--out", "be a folder to write in", got, remedy)), 1)


def _check_out(out: Path, runs: tuple[str, ...]) -> None:
    """Refuse a folder in which a run would replace what no demo has made."""
    for folder in (out / name for name in runs):
        if os.path.exists(folder) and not os.path.isfile(folder / "job.json"):
            remedy = "Its runs are written there: give another folder."
            rule = f"hold no `{folder.name}` of another making"
            raise refused("demo", "--out", rule, folder, remedy)


def watch(
    command: Annotated[
        list[str],
        typer.Argument(help="The command that starts the training, such as torchrun ... train.py."),
    ],
    every: Annotated[
        float, typer.Option(help="Seconds between two lines on standard error; 0 writes none.")
    ] = 10.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for rank 0's events, which `report` and `top` read.")
    ] = None,
) -> None:
    """Run a training unchanged, and say which ranks wait for which, and why."""
    from ..watch._start_watch import run

    try:
        status = run(command, every_s=every, run_dir="" if run_dir is None else str(run_dir))
    except ValueError as error:
        fail(str(error), 2)
    raise typer.Exit(status)


def top(
    run: Annotated[
        str, typer.Argument(help="A run's folder, its events.jsonl, or - for standard input.")
    ],
    refresh: Annotated[float, typer.Option(help="Seconds from one view to the next.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view of all ranks.")] = False,
) -> None:
    """Follow a run: its ranks, and which of them the others wait for, and why; q ends it.

    With - it reads events from standard input, such as those of another machine.
    """
    console = Console(highlight=False)
    try:
        within("top", "--refresh", refresh, 0.1, 3600, "1 second is a good pace.")
        source = _source(run)
        once = once or not console.is_terminal or console.is_dumb_terminal
        if once:  # a file is read up to its end, and a stream ends by itself
            while not source.is_over and (source.update(within_s=1.0) or run == "-"):
                pass
        else:
            with suppress(KeyboardInterrupt), quit_key() as wait:
                follow(source, console, title=run, refresh_s=refresh, wait=wait)
        # Of a view that was followed, what is left on the screen.
        console.print(TopView(source.run, run, source.remark, source.silent_s, fits=not once))
    except OSError as error:
        fail(str(unread("top", "RUN", run, error)), 2)
    except ValueError as error:
        fail(str(error), 2)


def _source(run: str) -> Source:
    if run == "-":
        return StreamSource(os.fdopen(os.dup(0), "rb"))
    check_ends("top", "RUN", Path(run), "Give what `Runtime(run_dir=...)` was given.")
    return FileSource(Path(run))


def report(
    run: Annotated[
        Path, typer.Argument(help="A recorded run's folder, or its events.jsonl.", metavar="RUN")
    ],
    compare: Annotated[
        Path | None, typer.Option(help="Another run, shown beside it.", metavar="RUN2")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page (default: report.html in the run's folder)."),
    ] = None,
) -> None:
    """Write one HTML page about a recorded run. The page needs no network and no server."""
    path = output or (run if os.path.isdir(run) else run.parent) / "report.html"
    try:
        runs = [_read(run, "RUN")] + ([] if compare is None else [_read(compare, "--compare")])
        for read in filter(None, (run, compare)):
            spare("report", events_file(read), path, example="report.html")
        made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
        text = page(runs, version=__version__, made=made)
        write_whole(path, [text])
    except OSError as error:
        fail(str(unwritten("report", path, error, example="report.html")), 2)
    except ValueError as error:
        fail(str(error), 2)
    for one in runs:
        if one.left_out:
            typer.echo(f"{one.name}: {one.left_out}.", err=True)
    typer.echo(f"{path} ({len(text.encode()) / 1e6:.1f} MB)")


def _read(run: Path, argument: str) -> ReportFigures:
    try:
        return read_figures(run)
    except OSError as error:
        raise unread("report", argument, run, error) from error
