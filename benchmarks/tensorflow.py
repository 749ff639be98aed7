"""TensorFlow and Keras, balanced: parameters, speed, traces, and what it takes to change."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks._common import Row, main, progress
from evenstep import AffineTime, Cluster, allocate

ROOT = Path(__file__).parents[1]
LAUNCHER = ROOT / "examples" / "local_workers.py"
WORKER = ROOT / "tests" / "tensorflow" / "cases" / "worker.py"
SPEEDS = np.array([1.0, 2.0, 4.0])
BATCH_SIZE = 70
SLOPE_S = 0.04 / SPEEDS  # the optimum of 70 rows: 400 ms

# Steps after which each rule has settled, and those that are measured then.
SETTLED = {
    "auto": 5,
    "dynamic-batching": 20,
    "lbb": 20,
    "lb-bsp-2018": 30,
    "lb-bsp-2020": 60,
}
MEASURED = 20


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Answer with every bar in turn."""
    with tempfile.TemporaryDirectory() as folder:
        yield from parameters(Path(folder))
    policies = ["auto"] if options.quick else list(SETTLED)
    with tempfile.TemporaryDirectory() as folder:
        yield from speeds(Path(folder), policies, MEASURED // 2 if options.quick else MEASURED)
    yield changes()


def parameters(folder: Path) -> Iterator[Row]:
    """Compare with one process what three workers train, and count traces."""
    progress("55 steps in `fit` and in a loop, and 200 with many sizes: three workers")
    found = {}
    for number, cases in ((3, ("fit", "loop", "many_sizes")), (1, ("fit", "loop"))):
        part = folder / str(number)
        part.mkdir()
        launch(number, [str(WORKER), str(part), *cases])
        found[number] = {case: read(part / f"{case}0.json") for case in cases}
    for case, what in (("fit", "`fit`"), ("loop", "a loop of the user's")):
        three, one = (np.array(found[number][case]["weights"]) for number in (3, 1))
        off = float(np.abs(three - one).max())
        yield Row(
            what=f"{what}: 55 steps, another plan at each, 3 workers against one process, fp64",
            bar="largest difference of a parameter <= 1e-9",
            measured={"largest": off, "relative": off / float(np.abs(one).max())},
            met=off <= 1e-9,
        )
    many = found[3]["many_sizes"]
    yield Row(
        what=f"{many['num_steps']} steps with {many['num_sizes']} sizes on the first worker",
        bar="1 trace of the training step",
        measured=many,
        met=many["traces"] == 1 and many["num_sizes"] >= 50,
    )


def speeds(folder: Path, policies: list[str], num_measured: int) -> Iterator[Row]:
    """Measure the median step against the best that these speeds allow."""
    times = AffineTime(np.zeros(len(SPEEDS)), SLOPE_S)
    best = allocate(times, Cluster(len(SPEEDS), BATCH_SIZE))
    optimum_s = float(times.seconds(best).max())
    steps = {name: SETTLED[name] + num_measured + 1 for name in policies}
    progress(f"{sum(steps.values())} steps with {', '.join(policies)}: three workers")
    asked = json.dumps({"slopes_s": SLOPE_S.tolist(), "policies": steps})
    launch(len(SPEEDS), ["-m", "benchmarks._tensorflow_run", str(folder), asked])
    found = read(folder / "speeds0.json")
    for name in policies:
        seconds = found[name]["seconds"][SETTLED[name] - 1 :]
        ratio = median(seconds) / optimum_s
        yield Row(
            what=f"{name}: 3 sleeping workers, speeds 1 : 2 : 4",
            bar=f"median step after {SETTLED[name]} steps <= 1.08 x the optimum",
            measured={
                "ratio": ratio,
                "median_step_s": median(seconds),
                "optimum_s": optimum_s,
                "batch_size": found[name]["batch_size"],
                "best_batch_size": best.tolist(),
                "first_steps_s": found[name]["seconds"][:5],
            },
            met=ratio <= 1.08,
        )


def changes() -> Row:
    """Count the lines that differ between the example and its plain twin."""
    plain, balanced = (
        (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
        for name in ("keras_digits_plain.py", "keras_digits.py")
    )
    diff = list(difflib.unified_diff(plain, balanced, lineterm=""))[2:]
    added = [line[1:].strip() for line in diff if line.startswith("+") and line[1:].strip()]
    return Row(
        what="examples/keras_digits.py beside examples/keras_digits_plain.py",
        bar="<= 5 changed lines, blank ones not counted",
        measured={"lines": len(added), "they are": added},
        met=len(added) <= 5,
    )


def launch(num_workers: int, arguments: list[str]) -> None:
    """Run a worker's program that often; raise with what was said if it fails."""
    launcher = [str(LAUNCHER), str(num_workers)] if num_workers > 1 else []
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": path}
    command = [sys.executable, *launcher, *arguments]
    done = subprocess.run(command, env={**os.environ, **quiet}, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])


def read(file: Path) -> Any:
    """Return what a worker wrote."""
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(__doc__, rows)
