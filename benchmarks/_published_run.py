"""One run of a published script, in a copy of its folder, and what it leaves."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._common import environment
from benchmarks._published_devices import SETTINGS
from benchmarks._published_scripts import Published

BASE_S = 0.03  # a step's time on the device that is not there
LIMIT_S = 240


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run left.

    Attributes:
        status: of the process.
        lines: what each rank computed, bit by bit: losses, and checksums of the parameters.
        times_s: when each loss of rank 0 was there.
        steps_s: when each of its optimizer steps was.
        said: the lines of the watch.
        error: the end of what it printed, where it failed.
    """

    status: int
    lines: dict[int, list[str]]
    times_s: list[float]
    steps_s: list[float]
    said: list[str]
    error: str

    @property
    def step_s(self) -> float:
        """The median between two losses."""
        return median(later - one for one, later in pairwise(self.times_s))


def run(
    one: Published,
    folder: Path,
    *,
    under: Sequence[str] = (),
    edit: Callable[[Path], None] = lambda copy: None,
    limit_s: float = LIMIT_S,
    **settings: Any,
) -> Ran:
    """Run a script once, in a copy of its folder.

    Args:
        one: the script.
        folder: that is copied.
        under: arguments of Python that come before those that start it.
        edit: changes the copy.
        limit_s: after which it is ended.
        settings: of ``_published_devices``, beside those that follow from the script.

    Raises:
        TimeoutExpired: it was not done in time.
    """
    with TemporaryDirectory() as name:
        place = Path(name)
        shutil.copytree(folder, place / "copy", ignore=shutil.ignore_patterns(".git"))
        edit(place / "copy")
        (place / "site").mkdir()
        (place / "site" / "sitecustomize.py").write_text("import benchmarks._published_devices\n")
        given = {
            "device": one.device,
            "num_devices": one.ranks,
            "stubs": one.stubs,
            "record": str(place / "record"),
            "base_s": BASE_S,
            "slow": -1,
            "more_s": 0.0,
        }
        done = subprocess.run(
            [sys.executable, *under, *_command(one)],
            cwd=place / "copy" / one.cwd,
            env=environment(str(place / "site"))
            | {SETTINGS: json.dumps(given | settings)}
            | one.env,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        return _ran(done, place)


def _command(one: Published) -> list[str]:
    """Return the arguments of Python that start a script."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(one.ranks)]
    start = [] if one.spawns else torchrun
    return [*start, one.script, *shlex.split(one.arguments)]


def _ran(done: subprocess.CompletedProcess[str], place: Path) -> Ran:
    """Read what a run left in a folder."""
    lines: dict[int, list[str]] = {}
    times_s: dict[str, list[float]] = {"loss": [], "step": []}
    for path in sorted(place.glob("record.*")):
        rows = [row.split() for row in path.read_text("ascii").splitlines()]
        rank = int(path.suffix[1:])
        lines[rank] = [" ".join(row[:2]) for row in rows]
        for row in rows if rank == 0 else ():
            times_s[row[0]].append(float(row[2]))
    said = re.findall(r"^evenstep watch: (.*)$", done.stderr, re.MULTILINE)
    errors = re.findall(
        r"^(?:\[rank\d+\]: ?)?(\w[\w.]*(?:Error|Exception): .*)$", done.stderr, re.M
    )
    error = "; ".join(dict.fromkeys(errors)) or done.stderr[-1000:]
    failed = error if done.returncode else ""
    return Ran(done.returncode, lines, times_s["loss"], times_s["step"], said, failed)


def commit_of(folder: Path) -> str:
    """Return the commit of a clone that has a folder, and whether its files there are others."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".")
    return git("rev-parse", "HEAD") + (" with changes" if changed else "")
