"""How the table of loop patterns is run on small clusters, whatever a pattern does to them."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import ClassVar, final

import numpy as np
import torch.distributed as dist

from benchmarks._patterns import PATTERNS, Trial
from evenstep import Cluster, Decision, StepTimings
from evenstep.exceptions import EvenstepWarning
from evenstep.policies import AbstractPolicy
from evenstep.testing import run_workers

EXACT = 1e-12
HANGING_S = 30.0
NO_ANSWER = "no answer"
# Every rank's size changes from each row to the next, and from the last to the first.
SIZES = {
    2: ((3, 16), (12, 7), (5, 14), (15, 4), (8, 11)),
    3: ((2, 11, 6), (9, 3, 7), (4, 10, 5), (8, 2, 9), (3, 12, 4)),
}


@final
@dataclass(frozen=True, slots=True)
class Turning(AbstractPolicy[int]):
    """The sizes of the next row after every reading, whatever was measured."""

    reading_s: float = 0.0  # of short steps, how long the sizes of a row are kept

    name: ClassVar[str] = "turning"

    def init(self, cluster: Cluster) -> Decision[int]:
        return self._row(cluster, 0)

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        return self._row(cluster, state)

    def _row(self, cluster: Cluster, number: int) -> Decision[int]:
        rows = SIZES[cluster.world_size]
        sizes = np.array(rows[number % len(rows)], np.int64)
        return Decision(sizes, number + 1, reason=f"row {number}")


@dataclass(frozen=True)
class Outcome:
    """What came of one pattern.

    Attributes:
        error: distance of the parameters from one process's, over their change; None if some rank
            raised or never answered.
        texts: what each rank raised, if anything.
        sizes: samples handed out, by rank and step.
        warned: what was warned of, on any rank.
    """

    error: float | None
    texts: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    warned: tuple[str, ...]

    @property
    def kind(self):
        """``exact``, ``wrong`` without a word, ``refused`` by an error, or ``hanging``."""
        if self.error is None:
            return "hanging" if NO_ANSWER in self.texts else "refused"
        return "exact" if self.error <= EXACT else "wrong"


def attempt(name: str, trial: Trial, policy: object) -> dict:
    """Return what one rank found: its part of an outcome, as JSON takes it."""
    pattern, noted = PATTERNS[name], []
    found = {"name": name, "error": None, "text": "", "sizes": []}
    try:
        ours = trial.balanced(pattern, policy, noted)
        before, theirs = trial.alone(pattern)
        assert (theirs - before).norm() > 1e-3, "the loop does not train"
        found["error"] = float((ours - theirs).norm() / (theirs - before).norm())
    except Exception as error:
        found["text"] = f"{type(error).__name__}: {error}"
    return found | {"sizes": [samples for samples, _ in noted]}


def attempts(rank: int, names: list[str], folder: str, trial: Trial, policy: object) -> None:
    """Try one pattern after the other, and write down what came of each.

    A process that is in one pattern for too long is ended, and with it the cluster. So it is after
    an error: the others come out of a collective by connections that are shut, those of the default
    group too.
    """
    with Path(folder, f"{rank}.jsonl").open("a", encoding="utf-8") as file:
        for name in names:
            dist.barrier()  # of the default group, which no pattern uses
            ending = Timer(HANGING_S, os._exit, (1,))
            ending.start()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", EvenstepWarning)
                found = attempt(name, trial, policy)
            ending.cancel()
            found["warned"] = [str(one.message) for one in caught]
            print(json.dumps(found), file=file, flush=True)
            if found["text"]:
                return


def table(
    world_size: int,
    names: list[str],
    folder: Path,
    *,
    reduction: str = "mean",
    reading_s: float = 0.0,
) -> dict[str, Outcome]:
    """Return what came of each pattern.

    All run in one cluster. Where a pattern raises, ends a process or hangs, a new cluster goes on
    with those after it.
    """
    found: dict[str, Outcome] = {}
    while left := [name for name in names if name not in found]:
        here = folder / f"{world_size}-{reduction}-{len(left)}"
        here.mkdir()
        work = left, str(here), Trial(reduction=reduction), Turning(reading_s)
        run_workers(world_size, attempts, *work, timeout_s=600.0, check=False)
        rows = [_rows(here / f"{rank}.jsonl") for rank in range(world_size)]
        for name in left:
            found[name] = _outcome([by_name.get(name) for by_name in rows])
            if found[name].kind in ("refused", "hanging"):
                break
    return found


def _rows(file: Path) -> dict[str, dict]:
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def _outcome(rows: list[dict | None]) -> Outcome:
    """Put together what the ranks found; None is a rank that never answered."""
    given = [
        {"error": None, "text": NO_ANSWER, "sizes": [], "warned": []} if row is None else row
        for row in rows
    ]
    errors = [row["error"] for row in given]
    return Outcome(
        error=None if None in errors else max(errors),
        texts=tuple(row["text"] for row in given),
        sizes=tuple(tuple(row["sizes"]) for row in given),
        warned=tuple(text for row in given for text in row["warned"]),
    )
