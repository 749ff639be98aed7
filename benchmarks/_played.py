"""Drawn runs with known causes, played in real processes under `evenstep watch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from benchmarks._common import ROOT, environment, progress
from benchmarks._injected import Drawn
from evenstep._telemetry import EventFile
from evenstep.events import RunEnded, WaitingDiagnosed

STEP_US = 60_000.0  # of a step without a disturbance: ten times what Python and gloo take of it
_PAGES = 1 << 13  # of the file that ranks read


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """What was seen of a run.

    Attributes:
        waiting_share: part of all ranks' time that they waited for others, by the script's clocks.
        found: what was said at its end.
    """

    waiting_share: float
    found: WaitingDiagnosed


def play(runs: Sequence[Drawn], folder: Path) -> list[PlayedRun]:
    """Play runs; those with as many ranks follow each other, the others go on beside them."""
    of_size: dict[int, list[int]] = {}
    for number, run in enumerate(runs):
        of_size.setdefault(run.own.shape[1], []).append(number)
    found: dict[int, PlayedRun] = {}

    def play_some(world_size: int, numbers: list[int]) -> None:
        own = folder / str(world_size)
        seen = _play_all([runs[number] for number in numbers], world_size, own)
        found.update(zip(numbers, seen, strict=True))

    threads = [Thread(target=play_some, args=item) for item in of_size.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(runs))]


def _play_all(runs: Sequence[Drawn], world_size: int, folder: Path) -> list[PlayedRun]:
    folder.mkdir(parents=True)
    names = [f"run{number}" for number in range(len(runs))]
    for name, run in zip(names, runs, strict=True):
        np.savez(folder / f"{name}.npz", **arrays(run))
    (folder / "runs.json").write_text(json.dumps(names), "utf-8")
    (folder / "pages").write_bytes(os.urandom(4096) * _PAGES)
    progress(f"{len(runs)} runs of {world_size} ranks")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={world_size}", "-m", "benchmarks._cause_script", str(folder)]
    watch = [sys.executable, "-m", "evenstep.watch", "--every", "0", "--run-dir", str(folder), "--"]
    with open(folder / "log.txt", "wb") as log:
        subprocess.run(
            [*watch, *torchrun], check=True, env=environment(), cwd=ROOT, stdout=log, stderr=log
        )
    said = diagnoses(folder / "events.jsonl")
    return [
        PlayedRun(waiting(folder, name, world_size), one)
        for name, one in zip(names, said, strict=True)
    ]


def arrays(run: Drawn) -> dict[str, Any]:
    """Return what ranks do, with steps that are short enough for a benchmark."""
    unit = STEP_US / run.step_us
    seconds = run.own.sum(axis=2, keepdims=False) * unit / 1e6
    return {
        "own_us": run.own * unit,
        "exchange_us": run.exchange * unit,
        "collected_us": run.collected * unit,
        "compiled_us": run.compiled * unit,
        "size": run.size,
        "pages": np.where(run.faults >= 20, run.faults * seconds, 0),
    }


def diagnoses(path: Path) -> list[WaitingDiagnosed]:
    """Return the last diagnosis of every run in a file of events."""
    found: list[WaitingDiagnosed] = []
    last: WaitingDiagnosed | None = None
    for event in EventFile(path):
        if isinstance(event, WaitingDiagnosed):
            last = event
        elif isinstance(event, RunEnded):
            assert last is not None
            found.append(last)
    return found


def waiting(folder: Path, name: str, world_size: int) -> float:
    """Return the part of all ranks' time for which they waited, by the clocks of the script."""
    arrived, left = [], []
    for rank in range(world_size):
        with np.load(folder / f"{name}-{rank}.npz") as marks:
            arrived.append(marks["arrived_s"])
            left.append(marks["left_s"])
    own = np.array(arrived)[:, 1:] - np.array(left)[:, :-1]
    whole = np.diff(np.array(left), axis=1)
    return float((own.max(axis=0) - own).sum() / whole.sum())
