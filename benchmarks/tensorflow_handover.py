"""Short steps under TensorFlow: what comes on top of the computing, above all the hand-over.

Three workers of speeds 1 : 2 : 4, emulated by sleeping, share 84 images of 8 x 8 in each step: 54
ms at best, 126 ms in equal parts. Plain `MultiWorkerMirroredStrategy` and evenstep train in turns,
in the same processes. Sleeps are a multiple of the processor time of a step (reported), or the
cores would be what is measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._common import Row, main, progress
from benchmarks.tensorflow import launch, read

SPEEDS = (1, 2, 4)
BATCH_SIZE = 84
EACH_S = tuple(0.0045 / speed for speed in SPEEDS)
LIMIT_S = EACH_S[0] * BATCH_SIZE / sum(SPEEDS)
EQUAL_S = EACH_S[0] * BATCH_SIZE / len(SPEEDS)
WAYS = ("loop, pipeline", "loop, arrays", "fit, pipeline")
WARM_UP = 15  # steps until `auto` has settled
MOST = 1.25
LEAST_SLEEP = 5.0


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Compare every way with what is possible, and with plain TensorFlow."""
    asked = {
        "each_s": EACH_S,
        "batch_size": BATCH_SIZE,
        "num_steps": 50 if options.quick else 90,
        "rounds": 1 if options.quick else 5,
        "ways": ["plain", *WAYS],
    }
    progress(f"{asked['rounds']} rounds of {asked['num_steps']} steps in 4 ways: three workers")
    with tempfile.TemporaryDirectory() as folder:
        worker = "benchmarks._tensorflow_handover_run"
        launch(len(SPEEDS), ["-m", worker, folder, json.dumps(asked)])
        workers = [read(Path(folder) / f"handover{rank}.json") for rank in range(len(SPEEDS))]
    plain = summary([worker["plain"] for worker in workers])
    yield Row(
        f"plain TensorFlow, equal parts: at best {1e3 * EQUAL_S:.0f} ms",
        "reported",
        {**plain, "of_limit": plain["step_s"] / LIMIT_S, "of_equal": plain["step_s"] / EQUAL_S},
    )
    for way in WAYS:
        found = summary([worker[way] for worker in workers])
        ratio, sleeps = found["step_s"] / LIMIT_S, LIMIT_S / found["cpu_s"]
        yield Row(
            f"{way}: {BATCH_SIZE} images, speeds 1 : 2 : 4, at best {1e3 * LIMIT_S:.0f} ms",
            f"median step <= {MOST} x the best; sleep >= {LEAST_SLEEP:g} x processor time",
            {
                "of_limit": ratio,
                "plain_of_limit": plain["step_s"] / LIMIT_S,
                "sleep_over_cpu": sleeps,
                **found,
            },
            met=ratio <= MOST and sleeps >= LEAST_SLEEP,
        )


def summary(workers: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over the steps of all rounds, as the first worker sees them.

    Processor time is that of the busiest worker.
    """
    first = workers[0]
    medians = {
        "step_s": median(settled(first, "seconds")),
        "cpu_s": max(median(settled(worker, "cpu_s")) for worker in workers),
        "spread_of_rounds_s": sorted(median(each["seconds"][WARM_UP:]) for each in first),
    }
    if "data_s" not in first[0]:
        return medians
    return {
        **medians,
        "data_s": median(settled(first, "data_s")),
        "compute_s": median(settled(first, "compute_s")),
        "batch_size": first[-1]["batch_size"],
    }


def settled(rounds: list[dict[str, Any]], name: str) -> list[float]:
    """Return the figures of all rounds without their first steps."""
    return [figure for each in rounds for figure in each[name][WARM_UP:]]


if __name__ == "__main__":
    main(__doc__, rows)
