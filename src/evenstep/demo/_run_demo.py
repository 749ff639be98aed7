"""The demo from beginning to end: an equal run, a balanced one, and what they show."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from .._render._words import ratio
from ._launch import Workers
from ._print_report import print_report
from ._recording import Follower, Recording
from ._screen import Screen
from ._settings import Settings
from ._summary import Summary, summarise
from ._training_job import LARGE, SMALL, TrainingJob

_LOOK_EVERY_S = 0.1
_BUDGET_S = 54.0


def run_demo(settings: Settings, console: Console) -> Summary:
    """Train both ways, show it on ``console``, and leave ``demo.png`` and ``summary.json``.

    Raises:
        DemoFailed: a worker process failed.
    """
    _introduce(settings, console)
    screen = Screen(console, settings.speeds)
    job = _first_job(settings)
    equal = _run(
        screen,
        settings.out / "equal",
        job,
        num_workers=settings.num_workers,
        title="1  Equal split",
        explanation="what plain DDP does: all workers get the same batch and wait for the slowest",
    )
    measured = equal.measured or {}
    job = replace(
        job,
        num_steps=measured["num_steps"],
        seconds_per_sample=measured["seconds_per_sample"],
    )
    balanced = _run(
        screen,
        settings.out / "balanced",
        replace(job, policy=settings.policy),
        num_workers=settings.num_workers,
        title=f"2  Balanced (policy {settings.policy})",
        explanation="the same text and first weights; evenstep is not told the speeds",
        scale_s=max(equal.makespan_s[-5:]),
    )
    reference = _run(
        screen,
        settings.out / "reference",
        replace(job, speeds=None),
        num_workers=None,
        title="3  One worker, not slowed down, for reference",
        explanation="how far does rounding alone move the losses?",
    )
    summary = summarise(equal, balanced, reference, speeds=settings.speeds)
    print_report(console, summary)
    _save(settings, summary, equal=equal, balanced=balanced)
    _say_where(settings.out, console)
    return summary


def _first_job(settings: Settings) -> TrainingJob:
    size = SMALL if settings.device == "cpu" else LARGE
    return TrainingJob(
        size=size,
        global_batch_size=size.batch_size * settings.num_workers,
        policy="equal",
        device=settings.device,
        speeds=settings.speeds,
        num_steps=settings.num_steps,
        budget_s=_BUDGET_S,
        seconds_per_sample=None,
        seed=settings.seed,
    )


def _run(
    screen: Screen,
    run_dir: Path,
    job: TrainingJob,
    *,
    num_workers: int | None,
    title: str,
    explanation: str,
    scale_s: float | None = None,
) -> Recording:
    """Run one job to its end while showing it, and return all it told."""
    shutil.rmtree(run_dir, ignore_errors=True)
    job.save(run_dir)
    follower = Follower(run_dir)
    screen.begin(title, explanation, scale_s=scale_s)
    finished = None
    try:
        with Workers(run_dir, num_workers) as workers:
            while workers.running():
                screen.show(follower.update())
                time.sleep(_LOOK_EVERY_S)
        finished = follower.update()
    finally:
        screen.end(finished)
    return finished


def _introduce(settings: Settings, console: Console) -> None:
    if settings.speeds is None:
        workers = f"{settings.num_workers} cards, as fast as they are"
    else:
        speeds = " : ".join(ratio(speed) for speed in settings.speeds)
        workers = f"{settings.num_workers} workers of speeds {speeds}, emulated on this machine"
    console.print(
        "\n[bold]evenstep demo[/]  a small GPT learns the sources of Python's standard library\n"
        f"               on {workers}\n",
        highlight=False,
    )


def _save(settings: Settings, summary: Summary, *, equal: Recording, balanced: Recording) -> None:
    from ._picture import save_picture  # matplotlib takes a second to load

    out, speeds = settings.out, settings.speeds
    (out / "summary.json").write_text(json.dumps(asdict(summary), indent=1) + "\n")
    save_picture(out / "demo.png", summary, equal=equal, balanced=balanced, speeds=speeds)


def _say_where(out: Path, console: Console) -> None:
    files = {"picture": "demo.png", "figures": "summary.json", "events": "balanced/events.jsonl"}
    console.print()
    for what, name in files.items():
        console.print(f"  {what:<7}  {out / name}", highlight=False, soft_wrap=True)
    console.print()
