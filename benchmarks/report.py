"""What a report of a long run on many ranks costs, and what a browser says of it.

A run of 100,000 steps on 64 ranks is written as training would write it, about 1 GB, and read into
one page. Chromium then opens the page: it may ask for nothing, complain of nothing, and has to
scroll; axe looks for what keeps people out. Without a browser the rows say why they are missing.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks._common import Row, main, progress
from benchmarks._headless import missing, opened, until, violations
from benchmarks._report_run import write_run

MOST_CPU_S, MOST_BYTES = 20.0, 5_000_000
VIEWS: dict[str, dict[str, Any]] = {
    "light": {},
    "dark": {"dark": True},
    "phone": {"width": 390, "height": 844},
}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield what making the page costs, then what each way of looking at it shows."""
    num_steps, world_size = (3000, 64) if options.quick else (options.steps, options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "long-run"
        progress(f"writing {num_steps:,} steps of {world_size} ranks")
        write_run(run / "events.jsonl", num_steps=num_steps, world_size=world_size)
        yield made(run, f"report of {num_steps:,} steps x {world_size} ranks")
        if why := missing():
            yield Row("the page in a browser", "not measured", {"reason": why})
            return
        for name, view in VIEWS.items():
            yield looked_at(run / "report.html", name, view)


def made(run: Path, what: str) -> Row:
    """Return what the command takes, in a process of its own as a user starts it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = perf_counter()
    subprocess.run(
        [sys.executable, "-m", "evenstep.cli", "report", run], check=True, stdout=subprocess.DEVNULL
    )
    wall_s = perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    size = (run / "report.html").stat().st_size
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    figures = {
        "seconds": wall_s,
        "CPU seconds": cpu_s,
        "MB": size / 1e6,
        "MB of events": (run / "events.jsonl").stat().st_size / 1e6,
        "peak MB of memory": after.ru_maxrss / 1024,
    }
    bar = f"<= {MOST_CPU_S:.0f} s of CPU time, <= {MOST_BYTES / 1e6:.0f} MB"
    return Row(what, bar, figures, cpu_s <= MOST_CPU_S and size <= MOST_BYTES)


def looked_at(path: Path, name: str, view: dict[str, Any]) -> Row:
    """Return what a browser says of the page in one way of looking at it."""
    with opened(path, **view) as (page, seen):
        start = perf_counter()
        page.keyboard.press("End")
        until(page, "scrollY + innerHeight >= document.body.scrollHeight - 50")
        figures = {
            "opened in s": seen.opened_s,
            "scrolled in s": perf_counter() - start,
            "requests": len(seen.requests),
            "complaints": len(seen.complaints),
            "serious": len(found := violations(page)),
            "wider than the screen": page.evaluate(
                "document.documentElement.scrollWidth > innerWidth"
            ),
        }
    for problem in (*seen.requests, *seen.complaints, *found):
        print(f"{name}: {problem}", file=sys.stderr)
    met = not any((seen.requests, seen.complaints, found, figures["wider than the screen"]))
    bar = "no request, no complaint, nothing serious found by axe, no wider than the screen"
    return Row(f"the page in Chromium, {name}", bar, figures, met)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the length of the run and its ranks."""
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
