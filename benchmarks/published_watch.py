"""Published training scripts under ``evenstep watch``, as they are: do they run, and is it right?

``--scripts DIR`` is a folder with clones of the repositories that are listed without it; nothing is
fetched here. Each script runs three times: alone, watched, and watched while one rank's forward
sleeps for one and a half steps. Losses and parameters of the first two are compared
bit by bit, rank by rank. The third has to name that rank first, because of compute.

No accelerator and no download is needed: ``_published_devices`` gives each process CPUs for its
devices, and ``_published_stubs`` small data and models. The text of the scripts stays as it is.
``--quick`` runs a script of ours instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._common import Row, main, progress
from benchmarks._published_devices import SETTINGS
from benchmarks._published_scripts import CHECKOUTS, OWN, PUBLISHED, Published

ROOT = Path(__file__).parents[1]
BASE_S = 0.03  # a step's time on the device that is not there
MORE = 1.5  # steps, for which the slow rank sleeps
BAR = "runs; losses bitwise equal; rank and cause named"
LIMIT_S = 240
WATCH = ("-m", "evenstep.watch", "--every", "0", "--", sys.executable)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run left.

    Attributes:
        status: of the process.
        lines: what each rank computed, bit by bit: losses, and checksums of the parameters.
        times_s: when each loss of rank 0 was there.
        said: the lines of the watch.
        error: the end of what it printed, where it failed.
    """

    status: int
    lines: dict[int, list[str]]
    times_s: list[float]
    said: list[str]
    error: str

    @property
    def step_s(self) -> float:
        """The median between two losses."""
        return median(later - one for one, later in pairwise(self.times_s))


def run(one: Published, folder: Path, *, watched: bool, slow: int = -1, more_s: float = 0.0) -> Ran:
    """Run a script once, in a copy of its folder."""
    with TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(folder, place / "copy", ignore=shutil.ignore_patterns(".git"))
        (place / "site").mkdir()
        (place / "site" / "sitecustomize.py").write_text("import benchmarks._published_devices\n")
        settings = {
            "device": one.device,
            "num_devices": one.ranks,
            "stubs": one.stubs,
            "record": str(place / "record"),
            "base_s": BASE_S,
            "slow": slow,
            "more_s": more_s,
        }
        paths = (str(place / "site"), str(ROOT / "src"), str(ROOT))
        done = subprocess.run(
            [sys.executable, *(WATCH if watched else ()), *command(one)],
            cwd=place / "copy" / one.cwd,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
            | {SETTINGS: json.dumps(settings)}
            | one.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        return ran(done, place)


def command(one: Published) -> list[str]:
    """Return the arguments of Python that start a script."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(one.ranks)]
    start = [] if one.spawns else torchrun
    return [*start, one.script, *shlex.split(one.arguments)]


def ran(done: subprocess.CompletedProcess[str], place: Path) -> Ran:
    """Read what a run left in a folder."""
    lines: dict[int, list[str]] = {}
    times_s: list[float] = []
    for path in sorted(place.glob("record.*")):
        rows = [row.split() for row in path.read_text("ascii").splitlines()]
        rank = int(path.suffix[1:])
        lines[rank] = [" ".join(row[:2]) for row in rows]
        if rank == 0:
            times_s = [float(row[2]) for row in rows if row[0] == "loss"]
    said = re.findall(r"^evenstep watch: (.*)$", done.stderr, re.MULTILINE)
    errors = re.findall(
        r"^(?:\[rank\d+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)$", done.stderr, re.M
    )
    error = "; ".join(dict.fromkeys(errors)) or done.stderr[-1000:]
    return Ran(done.returncode, lines, times_s, said, error if done.returncode else "")


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
        alone = run(one, folder, watched=False)
        if alone.status or len(alone.times_s) < 3:
            return Row(one.name, BAR, figures | {"failed_alone": alone.error}, False)
        more_s = MORE * alone.step_s
        what = "watched"
        watched = run(one, folder, watched=True)
        what = "watched, with a slow rank"
        slowed = run(one, folder, watched=True, slow=slow, more_s=more_s)
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


def commit_of(folder: Path) -> str:
    """Return the commit of a clone that has a folder, and whether its files there are others."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each script; without a folder, one for each repository that is needed."""
    if options.quick:
        with TemporaryDirectory() as name:
            shutil.copy(ROOT / "benchmarks" / OWN.script, name)
            yield measured(OWN, Path(name), "", 1)
        return
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
