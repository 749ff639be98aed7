"""Whether sizes come near the best ones in every loop that people write.

Two workers at 0.25 and 1 ms a sample, slept in every forward, and 80 samples a step: 64 and 16 are
best. Each loop of `benchmarks/_patterns/` runs 30 steps or more under `auto`. Where the sizes are
not near, a warning has to say why.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks._common import Row, main, progress
from benchmarks._patterns import PATTERNS, Pattern, Trial
from evenstep.testing import WorkerFailed, run_workers
from evenstep.torch import Bounds, Runtime

SECONDS_PER_SAMPLE = (0.00025, 0.001)
# Where a batch is cut, every few samples have a forward and a backward of their own, which take
# half a millisecond of CPU time: what is slept has to be a multiple of that.
LONGER_WHERE_CUT = 8
GLOBAL_BATCH_SIZE, BEST = 80, (64, 16)
NUM_STEPS, NEAR = 30, 1.10
QUICK = (
    "plain",
    "prefetched by one",
    "thread with a queue of four",
    "stream prefetcher",
    "fetch between forward and backward",
    "accumulation",
    "micro batches of steps",
    "gan",
    "loss logged before backward",
    "evaluated in between",
)


class _Told(logging.Handler):
    """Keeps what evenstep logs as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(rank: int, name: str) -> dict[str, Any]:
    """Return this rank's sizes and seconds of every step, and the warnings of its run."""
    trial = Trial(
        global_batch_size=GLOBAL_BATCH_SIZE,
        num_samples=NUM_STEPS * GLOBAL_BATCH_SIZE,
        seconds_by_rank=seconds_per_sample(PATTERNS[name]),
        runtime=Runtime(line_every=None, deadline_s=20.0, hang_s=30.0, claims="off"),
    )
    noted: list[tuple[int, float]] = []
    told, problem = _Told(), None
    logging.getLogger("evenstep").addHandler(told)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trial.balanced(PATTERNS[name], "auto", noted)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    ours = [str(each.message) for each in caught if each.category.__module__.startswith("evenstep")]
    return {
        "sizes": [samples for samples, _ in noted],
        "step_s": [later - sooner for (_, sooner), (_, later) in pairwise(noted)],
        "warnings": told.texts + ours,
        "problem": problem,
    }


def seconds_per_sample(pattern: Pattern) -> tuple[float, ...]:
    """Return what every worker sleeps for a sample."""
    factor = 1 if pattern.bounds == Bounds() else LONGER_WHERE_CUT
    return tuple(factor * each for each in SECONDS_PER_SAMPLE)


def makespan_s(sizes: tuple[int, ...]) -> float:
    """Return how long the slower worker takes for its samples."""
    return max(size * each for size, each in zip(sizes, SECONDS_PER_SAMPLE, strict=True))


def row_of(pattern: Pattern) -> Row:
    """Run one pattern and return its row."""
    what = f"{pattern.name}: {pattern.origin}"
    bar = f"sizes within {NEAR - 1:.0%} of the optimum, or a warning says why not"
    found = run_workers(2, train, pattern.name, timeout_s=120.0, check=False)
    failed = [each for each in found if isinstance(each, WorkerFailed)]
    if failed:
        return Row(what, bar, {"problem": str(failed[0]).strip().splitlines()[-1]}, met=False)
    first, other = found
    if first["problem"] is not None:
        return Row(what, bar, {"problem": first["problem"]}, met=pattern.remedy is not None)
    steps = list(zip(first["sizes"], other["sizes"], strict=False))
    full = [sizes for sizes in steps[:NUM_STEPS] if sum(sizes) == GLOBAL_BATCH_SIZE]
    over = median(makespan_s(sizes) for sizes in full[-5:]) / makespan_s(BEST)
    told = first["warnings"] + other["warnings"]
    measured = {
        "sizes": full[-1],
        "over_optimum_last_5": over,
        "first_steps_s": median(first["step_s"][:4]),
        "last_steps_s": median(first["step_s"][NUM_STEPS - 11 : NUM_STEPS - 1]),
        "warning": told[0] if told else "none",
    }
    return Row(what, bar, measured, met=over <= NEAR or bool(told))


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run every pattern whose steps last as long as their samples, or ten of them."""
    names = options.only or (QUICK if options.quick else PATTERNS)
    patterns = [PATTERNS[name] for name in names]
    for pattern in patterns:
        if pattern.timed:
            progress(pattern.name)
            yield row_of(pattern)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add a choice of patterns."""
    parser.add_argument("--only", nargs="+", choices=list(PATTERNS), help="these alone")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
