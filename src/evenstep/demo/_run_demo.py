"""The demo from beginning to end: an equal run, a balanced one, and what they show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from .._render import ratio, seconds, sizes, text_table
from .._telemetry import EventFile
from .._top import FileSource, watch
from ..events import StepMeasured
from ._worker import DemoJob, DemoOutcome

RUNS = ("equal", "balanced")
"""Folders of the runs. What an earlier demo left there goes."""

_TITLES = "1 Equal split, as plain DDP", "2 Balanced, not told the speeds"
_LINE_EVERY_S = 5.0
_PATIENCE_S = 5.0
_TOO_LATE = 0.05
_COLORS = "#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#aaaaaa"
"""Of the workers; distinguishable for most colour-blind people (Tol 2021)."""


class DemoFailed(RuntimeError):
    """A worker process failed; the message holds its own last words."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run in numbers.

    Attributes:
        step_s: median time of a step, communication and optimizer included.
        total_s: all steps together.
        idle_share: share of the workers' time spent waiting for the slowest, the median, in [0, 1).
        batch_size: samples per rank in the last step.
        compute_s: median time of own computing in the second half of the run, per rank.
        final_loss: of the last step.
    """

    step_s: float
    total_s: float
    idle_share: float
    batch_size: tuple[int, ...]
    compute_s: tuple[float, ...]
    final_loss: float

    @classmethod
    def of(cls, steps: Sequence[StepMeasured], loss: Sequence[float]) -> RunFigures:
        """Return the figures of a run's steps and losses."""
        walls_s = [step.wall_s for step in steps if step.wall_s is not None]
        step_s = median(walls_s)
        late = [step.compute_s for step in steps[len(steps) // 2 :]]
        return cls(
            step_s=step_s,
            # A step without a time of its own, the last, counts as a usual one.
            total_s=sum(walls_s) + step_s * (len(steps) - len(walls_s)),
            idle_share=median(step.idle_share for step in steps),
            batch_size=steps[-1].batch_size,
            compute_s=tuple(median(rank) for rank in zip(*late, strict=True)),
            final_loss=loss[-1],
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The demo's result.

    Attributes:
        num_steps: optimizer steps of each run.
        equal: the run with equal shares.
        balanced: the run with balanced shares.
        speed_up: step time of the equal run over that of the balanced one.
        limit_s: global batch over the summed speeds: all workers busy all the time. No split of
            the batch can be faster.
        share_of_limit: ``limit_s`` over the balanced run's step time, 1 is perfect.
        loss_difference: largest difference between the two loss curves.
        late_share: share of the steps in which emulation could not keep up; above a few percent
            the machine was too busy for the figures to mean much.
    """

    num_steps: int
    equal: RunFigures
    balanced: RunFigures
    speed_up: float
    limit_s: float
    share_of_limit: float
    loss_difference: float
    late_share: float


def run_demo(job: DemoJob, out: Path, console: Console) -> Summary:
    """Train both ways, show it on ``console``, and leave ``demo.png`` and ``summary.json``.

    Args:
        job: of the balanced run.
        out: the folder for all of it.
        console: a terminal has the view of ``evenstep top``, a log a line now and then.

    Raises:
        DemoFailed: a worker process failed.
        OSError: ``out`` cannot be written.
    """
    speeds = " : ".join(map(ratio, job.speeds))
    console.print(
        "\n[bold]evenstep demo[/]  a small GPT learns the sources of Python's standard library on\n"
        f"               {len(job.speeds)} workers of speeds {speeds}, emulated here\n",
        highlight=False,
    )
    first, second = (out / name for name in RUNS)
    equal = _trained(replace(job, policy="equal"), first, _TITLES[0], console)
    settled = replace(job, num_steps=equal.num_steps, seconds_per_sample=equal.seconds_per_sample)
    balanced = _trained(settled, second, _TITLES[1], console)
    summary = summarise(_steps(first), _steps(second), equal, balanced, job)
    console.print(report(summary), highlight=False)
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    save_picture(out / "demo.png", summary, job.speeds)
    console.print(f"  demo.png and summary.json are in {out}", highlight=False, soft_wrap=True)
    return summary


def _steps(run_dir: Path) -> list[StepMeasured]:
    return [event for event in EventFile(run_dir) if isinstance(event, StepMeasured)]


def _trained(job: DemoJob, run_dir: Path, title: str, console: Console) -> DemoOutcome:
    """Run one job to its end while showing it."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "job.json").write_text(json.dumps(asdict(job)))
    (run_dir / "events.jsonl").touch()
    source = FileSource(run_dir)
    with workers(run_dir, len(job.speeds)) as process:
        if console.is_terminal and not console.is_dumb_terminal:
            view = watch(
                source, console, title=title, refresh_s=0.25, wait=lambda s: _ended(process, s)
            )
            console.print(view)
        else:
            console.print(title, highlight=False)
            while not _ended(process, _LINE_EVERY_S):
                source.update(within_s=1.0)
                console.print(_line(source), highlight=False)
    if process.returncode:
        raise DemoFailed(_last_words(run_dir, process.returncode))
    return DemoOutcome(**json.loads((run_dir / "outcome.json").read_text()))


def _line(source: FileSource) -> str:
    run = source.run
    if run.start is None or run.last is None:
        return "  starting the workers ..."
    return (
        f"  step {run.last.step + 1}/{run.start.num_steps}   batch {sizes(run.last.batch_size)}"
        f"   {seconds(run.step_s or 0.0)} a step   idle {run.idle_share or 0:.0%}"
    )


@contextmanager
def workers(run_dir: Path, num_workers: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the processes of a run by torchrun; none is left behind.

    Args:
        run_dir: holds ``job.json``; all that they print goes to ``output.txt`` there.
        num_workers: how many.
    """
    # localhost: the machine's own name need not resolve, on a laptop say.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    worker = [f"--nproc-per-node={num_workers}", "-m", f"{__package__}._worker", str(run_dir)]
    with (run_dir / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *torchrun, *worker],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the others
        )
    try:
        yield process
    finally:
        process.terminate()  # torchrun passes it on to the workers
        if not _ended(process, _PATIENCE_S):
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of a worker: this one's, with one thread for arithmetic."""
    changed = {"OMP_NUM_THREADS": "1"}
    if Path("/sys/class/net/lo").exists():
        changed["GLOO_SOCKET_IFNAME"] = "lo"  # all on this machine, whatever its name resolves to
    if (here := str(Path.cwd())) in sys.path:  # a policy found there is found by the workers too
        changed["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.getenv("PYTHONPATH")])])
    return {**os.environ, **changed}


def _ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _last_words(run_dir: Path, code: int) -> str:
    """Return the error of the worker that failed first, and where the rest can be read."""
    failed, output = run_dir / "failed.txt", run_dir / "output.txt"
    log = failed if failed.exists() else output
    lines = log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"]
    error = next(
        (line for line in lines if line[:1].strip() and line[:9] != "Traceback"), lines[-1]
    )
    said = error if log is failed else "\n".join(lines[-15:])
    return f"the workers ended with code {code}:\n\n{said}\n\nMore in {log}"


def summarise(
    equal_steps: Sequence[StepMeasured],
    balanced_steps: Sequence[StepMeasured],
    equal: DemoOutcome,
    balanced: DemoOutcome,
    job: DemoJob,
) -> Summary:
    """Return what complete runs show."""
    one = RunFigures.of(equal_steps, equal.loss)
    other = RunFigures.of(balanced_steps, balanced.loss)
    limit_s = job.global_batch_size * balanced.seconds_per_sample / sum(job.speeds)
    return Summary(
        num_steps=balanced.num_steps,
        equal=one,
        balanced=other,
        speed_up=one.step_s / other.step_s,
        limit_s=limit_s,
        share_of_limit=limit_s / other.step_s,
        loss_difference=max(abs(a - b) for a, b in zip(equal.loss, balanced.loss, strict=True)),
        late_share=max(equal.num_late, balanced.num_late) / balanced.num_steps,
    )


def report(summary: Summary) -> str:
    """Return what the demo says at the end."""
    columns = [
        [
            sizes(run.batch_size),
            seconds(run.step_s),
            f"{run.idle_share:.0%}",
            seconds(run.total_s),
            f"{run.final_loss:.4f}",
        ]
        for run in (summary.equal, summary.balanced)
    ]
    names = ["  batch sizes", "  step time", "  workers idle"]
    names += [f"  {summary.num_steps} steps took", "  final loss"]
    text = (
        f"\n[bold]Result  [green]{summary.speed_up:.1f} times as fast[/green], at "
        f"{summary.share_of_limit:.0%} of what is physically possible[/bold]\n\n"
        f"{text_table(('', 'equal split', 'balanced'), zip(names, *columns, strict=True))}\n\n"
        f"  Physical limit {seconds(summary.limit_s)}: every worker busy all the time.\n"
        f"  Same training: the losses differ by at most {summary.loss_difference:.1e}.\n"
    )
    if summary.late_share > _TOO_LATE:
        text += (
            f"\n[yellow]In {summary.late_share:.0%} of the steps this machine was too busy to play"
            " its workers on time, so take the figures with care, or run it again.[/]\n"
        )
    return text


def save_picture(path: Path, summary: Summary, speeds: Sequence[float]) -> None:
    """Draw a usual step of both runs side by side into ``path``, a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second to load
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.45 * len(speeds)), layout="constrained")
    FigureCanvasAgg(figure)
    gain = (
        f"{summary.speed_up:.1f} times as fast on the same workers, with the same training result"
    )
    figure.suptitle(gain, fontsize=15, fontweight="bold", x=0.01, ha="left")
    runs = (("Equal split", summary.equal), ("Balanced", summary.balanced))
    for axes, (name, run) in zip(figure.subplots(1, 2), runs, strict=True):
        busy_s, end_s = run.compute_s, max(run.compute_s)
        ranks = range(len(speeds))
        axes.barh(ranks, busy_s, color=[_COLORS[rank % len(_COLORS)] for rank in ranks])
        waits = [end_s - one for one in busy_s]
        axes.barh(ranks, waits, left=busy_s, color="#e4e4e4", hatch="///", edgecolor="white")
        axes.barh(ranks, run.step_s - end_s, left=end_s, color="#555555")
        for rank, size in enumerate(run.batch_size):
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
            axes.text(0.01 * summary.equal.step_s, rank, f"{size} samples", va="center", bbox=box)
        axes.set_title(f"{name}: one step takes {seconds(run.step_s)}", loc="left")
        axes.set_yticks(ranks, [f"worker {rank}\nspeed {ratio(speeds[rank])}" for rank in ranks])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.04 * summary.equal.step_s)
        axes.set_xlabel("seconds: computing, waiting (hatched), the rest (dark)")
        axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(summary.limit_s, color="black", linestyle="--", linewidth=1)
    limit = f"physical limit {seconds(summary.limit_s)}:\n{summary.share_of_limit:.0%} reached"
    at = (summary.balanced.step_s + 0.03 * summary.equal.step_s, (len(speeds) - 1) / 2)
    axes.text(*at, limit, va="center")
    figure.savefig(path, dpi=130)
