"""A rival's file: what was installed, and each of its rounds, kept as it ends."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._cells import Command, run_cell
from benchmarks._common import progress
from benchmarks.rivals._environments import RIVALS, NotInstalledError, python_of, versions_of
from benchmarks.rivals._task import SECONDS_PER_SAMPLE, WORLD_SIZE, Setting

Found = dict[str, Any]
START_S, SLOWER = 60.0, 12.0
"""What starting the workers may take on a busy machine, and how much slower than equal batches."""


def opened(name: str, folder: Path, *, into: Path, clones: Path | None) -> Found:
    """Return what is known of a rival: from its file, or a new one once it is installed.

    What could not be installed is tried again. A rival without clones, of which it needs one,
    is left as it is in the file.
    """
    path, rival = folder / f"{name}.json", RIVALS[name]
    if path.exists():
        kept: Found = json.loads(path.read_text("utf-8"))
        if kept["installed"]:
            return kept
    found: Found = {
        "rival": name,
        "command": "python -m benchmarks.rivals --resume evidence/rivals"
        + (" --clones CLONES" if rival.clone else ""),
        "machine": {"python": platform.python_version(), "cores": os.cpu_count()},
        "task": {
            "global_batch_size": rival.global_batch_size,
            "num_train": rival.num_train,
            "seconds_per_sample": SECONDS_PER_SAMPLE,
        },
        "installed": {},
        "error": None,
        "rounds": [],
    }
    try:
        if rival.clone and (clones is None or not (clones / rival.clone).exists()):
            raise NotInstalledError(f"`--clones` names no folder that has {rival.clone}")
        found["installed"] = versions_of(name, python_of(name, into), clones)
    except NotInstalledError as error:
        found["error"] = str(error)
        progress(f"{name}: {error}")
    return found


def run_round(found: Found, *, num_epochs: int, into: Path, clones: Path | None) -> None:
    """Add one round to a rival. One that fails is kept as well: it is a result."""
    name, number = found["rival"], len(found["rounds"])
    rival = RIVALS[name]
    setting = Setting(
        num_epochs=num_epochs,
        seed=number,
        num_train=rival.num_train,
        global_batch_size=rival.global_batch_size,
        clones=None if clones is None else str(clones),
    )
    words = [sys.executable, "-m", "benchmarks.rivals._launch", python_of(name, into)]
    words += [rival.script, json.dumps(asdict(setting))]
    equal_s = num_epochs * rival.num_train / WORLD_SIZE * max(SECONDS_PER_SAMPLE)
    progress(f"{name}: round {number + 1}")
    round_ = run_cell(Command(words, timeout_s=START_S + SLOWER * equal_s))
    round_.update(round_.pop("result", {}))
    if "error" in round_:
        round_["error"] = round_["error"].replace(f"{into}{os.sep}", "INTO/")
    found["rounds"].append(round_)


def write(found: Found, folder: Path) -> None:
    """Write the file as a whole, a line for each round."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found['rival']}.json"
    head = json.dumps({key: value for key, value in found.items() if key != "rounds"}, indent=1)
    rounds = ",\n  ".join(json.dumps(each) for each in found["rounds"])
    text = head.removesuffix("\n}") + f',\n "rounds": [\n  {rounds}\n ]\n}}\n'
    partial = path.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)
