"""Whether advice comes true: step times predicted from plain training, and measured after it.

Four ranks train with DDP on devices that are emulated by sleeping, at least five times as long as
they compute. What plain DDP took in each phase says what `Balancer()` and `Balancer(cost=lengths)`
would take. Then both train on the same samples, and their steps are measured. The first 30 steps of
each are left out, in which evenstep learns. All take turns in two rounds, as the machine may be
slower for some minutes.

Rows that begin with "watched" run a script as it is under `evenstep watch`, read what that says at
its end, and run the script with the change: two ranks, of which one is a third as fast. For Keras
the callback watches.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks._common import ROOT, Row, environment, main, progress
from benchmarks._watch_advice_run import NUM_RANKS, Cell, Trained, train
from evenstep.testing import run_workers
from evenstep.watch._counterfactuals import Counterfactuals, WatchedSteps, foresee

LEARNT = 30  # steps
BAR = "predicted within 5 % of measured"
SCRIPT = ROOT / "benchmarks" / "_watch_advice_script.py"
LAUNCHER = ROOT / "examples" / "local_workers.py"
TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
KINDS = ("DDP", "FSDP2", "Trainer", "Accelerate", "Keras")
CELLS = (
    Cell("equal", "equal"),
    Cell("1:1:2:4", "equal"),
    Cell("equal", "unequal"),
    Cell("1:1:2:4", "unequal"),
    Cell("1:1:2:4", "unequal", curve=0.5),
    Cell("equal", "unequal", delay_s=0.1),
)


def foreseen(plain: list[Trained]) -> Counterfactuals:
    """Return what plain training says of the steps after those in which evenstep learns."""
    return foresee(
        WatchedSteps.of(
            np.stack([one.spent_us[LEARNT - 5 :] for one in plain], axis=1),
            num_samples=np.stack([one.num_samples[LEARNT - 5 :] for one in plain], axis=1),
            size=np.stack([one.size[LEARNT - 5 :] for one in plain], axis=1),
        )
    )


def step_s(ranks: list[Trained]) -> float:
    """Return the mean of the steps after that."""
    return float(np.mean([one.spent_us[LEARNT:].sum(axis=1).mean() for one in ranks]) / 1e6)


def measured(cell: Cell, num_steps: int, num_rounds: int) -> Row:
    """Return the row of a cell."""
    methods = ("plain", "by speed", *(["by both"] if cell.lengths == "unequal" else []))
    progress(f"{cell}: {num_rounds} rounds of {num_steps} steps each of {', '.join(methods)}")
    load = os.getloadavg()[0]
    ranks = run_workers(NUM_RANKS, train, cell, methods * num_rounds, num_steps, timeout_s=900)
    runs = [[one[at] for one in ranks] for at in range(len(methods) * num_rounds)]
    of = {method: runs[at :: len(methods)] for at, method in enumerate(methods)}
    told = [foreseen(plain) for plain in of["plain"]]
    steps_s = [step_s(plain) for plain in of["plain"]]
    plain_s = sum(steps_s)
    figures, errors = {"plain_s": plain_s / num_rounds}, []
    for method in methods[1:]:
        gains = [one.by_speed if method == "by speed" else one.by_both for one in told]
        took_s = sum(step_s(run) for run in of[method])
        predicted_s = sum(
            as_it_is_s / (gain.factor or 1) for as_it_is_s, gain in zip(steps_s, gains, strict=True)
        )
        errors.append(predicted_s / took_s - 1)
        name = method.replace(" ", "_")
        figures[f"{name}_predicted"] = plain_s / predicted_s
        figures[f"{name}_measured"] = plain_s / took_s
        figures[f"{name}_error_of_step"] = errors[-1]
    sleep_over_cpu = min(one.sleep_over_cpu for run in runs for one in run)
    checks = {"sleep_over_cpu": sleep_over_cpu, "load_average": [load, os.getloadavg()[0]]}
    good = max(map(abs, errors)) <= 0.05 and sleep_over_cpu >= 5
    return Row(str(cell), BAR, figures | checks, good)


def watched(kind: str, num_rounds: int) -> Row:
    """Return the row of a script that is watched, and then changed."""
    progress(f"watched, {kind}: {num_rounds} rounds")
    plain_s = predicted_s = took_s = 0.0
    load, sleep_over_cpu = os.getloadavg()[0], float("inf")
    for _ in range(num_rounds):
        said = script(kind, "plain")
        as_it_is_s = printed("step_s", said)
        found = re.search(r"balanced by speed ([0-9.]+)x", said)
        if found is None:
            raise RuntimeError(f"nothing was predicted of {kind}:\n{said[-4000:]}")
        plain_s += as_it_is_s
        predicted_s += as_it_is_s / float(found[1])
        took_s += printed("step_s", script(kind, "balanced"))
        sleep_over_cpu = min(sleep_over_cpu, printed("sleep_over_cpu", said))
    error = predicted_s / took_s - 1
    figures = {
        "plain_s": plain_s / num_rounds,
        "by_speed_predicted": plain_s / predicted_s,
        "by_speed_measured": plain_s / took_s,
        "by_speed_error_of_step": error,
        "sleep_over_cpu": sleep_over_cpu,
        "load_average": [load, os.getloadavg()[0]],
    }
    return Row(
        f"watched, {kind}, speeds 1:3", BAR, figures, abs(error) <= 0.05 and sleep_over_cpu >= 5
    )


def script(kind: str, how: str) -> str:
    """Return what the script prints, on two ranks; it is watched where it is plain."""
    is_plain, python = how == "plain", [sys.executable]
    if kind == "Keras":
        command = [*python, str(LAUNCHER), "2", "-m", "benchmarks._watch_advice_keras", how]
    else:
        watch = [*python, "-m", "evenstep.watch", "--every", "0", "--"] if is_plain else []
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*watch, *python, *torchrun, str(SCRIPT), kind, how]
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment() | TENSORFLOW | {"TF_USE_LEGACY_KERAS": str(int(is_plain))},
            text=True,
            capture_output=True,
            timeout=300,
        )
    if done.returncode:
        raise RuntimeError(f"{kind}, {how}:\n{done.stderr[-4000:]}")
    return done.stdout + done.stderr


def printed(name: str, said: str) -> float:
    """Return a figure that the script printed."""
    found = re.search(rf"^{name} ([0-9.]+)$", said, re.M)
    assert found is not None, said[-4000:]
    return float(found[1])


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each cell."""
    for cell in CELLS[:2] if options.quick else CELLS:
        yield measured(cell, LEARNT + (20 if options.quick else 60), 1 if options.quick else 2)
    for kind in () if options.quick else KINDS:
        yield watched(kind, 2)


if __name__ == "__main__":
    main(__doc__ or "", rows)
