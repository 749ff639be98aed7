"""Published training scripts under ``evenstep watch``, as they are: do they run, and is it right?

``--scripts DIR`` is a folder with clones of the repositories that are listed without it; nothing is
fetched here. Each script runs three times: alone, watched, and watched while one rank's forward
sleeps for one and a half steps. Losses and parameters of the first two are compared
bit by bit, rank by rank. The third has to name that rank first, because of compute.

No accelerator and no download is needed: ``_published_devices`` gives each process CPUs for its
devices, and ``_published_stubs`` small data and models. The text of the scripts stays as it is.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._common import Row, main, progress
from benchmarks._published_run import commit_of, run
from benchmarks._published_scripts import CHECKOUTS, PUBLISHED, Published

MORE = 1.5  # steps, for which the slow rank sleeps
BAR = "runs; losses bitwise equal; rank and cause named"
WATCH = ("-m", "evenstep.watch", "--every", "0", "--", sys.executable)


def verdict(said: list[str]) -> tuple[str, int | None, str]:
    """Return the sentence at the end, with the rank and the cause that it names first."""
    text = next((line for line in said if re.match(r"\d+ steps, ", line)), "")
    found = re.search(r"is waiting, for rank (\d+)[^,]*, because of ([^;.]*)", text)
    return (text, int(found[1]), found[2]) if found else (text, None, "")


def measured(one: Published, folder: Path, commit: str, slow: int) -> Row:
    """Return the row of a script."""
    progress(one.name)
    figures: dict[str, Any] = {
        "commit": commit,
        "arguments": one.arguments,
        "stubs": [f"CPUs for {one.device}", *one.stubs],
        "ranks": one.ranks,
        "slow_rank": slow,
    }
    what = "alone"
    try:
        alone = run(one, folder)
        if alone.status or len(alone.times_s) < 3:
            return Row(one.name, BAR, figures | {"failed_alone": alone.error}, False)
        more_s = MORE * alone.step_s
        what = "watched"
        watched = run(one, folder, under=WATCH)
        what = "watched, with a slow rank"
        slowed = run(one, folder, under=WATCH, slow=slow, more_s=more_s)
    except subprocess.TimeoutExpired as error:
        text = f"{what}: not done after {error.timeout} s"
        return Row(one.name, BAR, figures | {"error": text}, False)
    text, rank, cause = verdict(slowed.said)
    is_off = any(line.startswith("off") for line in (*watched.said, *slowed.said))
    figures |= {
        "losses": sum(row.startswith("loss") for row in alone.lines[0]),
        "step_s": alone.step_s,
        "sleep_s": more_s,
        "runs": not (watched.status or slowed.status or is_off),
        "bitwise_equal": alone.lines == watched.lines,
        "rank_right": rank == slow,
        "cause_right": cause == "compute",
        "undisturbed": verdict(watched.said)[0],
        "slowed": text,
        "error": watched.error or slowed.error,
    }
    names = ("runs", "bitwise_equal", "rank_right", "cause_right")
    return Row(one.name, BAR, figures, all(figures[name] for name in names))


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each script; without a folder, one for each repository that is needed."""
    if options.scripts is None:
        for name, (url, commit) in CHECKOUTS.items():
            figures = {"url": url, "commit": commit}
            yield Row(f"{name}, in the folder of --scripts", "to be cloned by you", figures)
        return
    for number, one in enumerate(PUBLISHED):
        if options.only in one.name:
            folder = options.scripts / one.checkout / one.folder
            yield measured(one, folder, commit_of(folder), (number + 1) % one.ranks)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where the scripts are."""
    parser.add_argument("--scripts", type=Path, help="a folder with clones of the repositories")
    parser.add_argument("--only", default="", help="scripts with this in their name")


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
