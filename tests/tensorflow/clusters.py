"""Clusters of TensorFlow's in processes of their own, as TF_CONFIG wants them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "examples" / "local_workers.py"
WORKER = Path(__file__).parent / "cases" / "worker.py"


def environment(**more):
    """A quiet one, without an accelerator, that finds this tree."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    return {**os.environ, "PYTHONPATH": path, **quiet, **more}


def start(folder, num_workers, *cases):
    """Start workers that run the cases and write to ``folder``; return what runs them."""
    folder.mkdir()
    launcher = [LAUNCHER, str(num_workers)] if num_workers > 1 else []
    command = [sys.executable, *launcher, WORKER, folder, *cases]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment(), text=True, **pipes)


def found(folder, case, num_workers):
    """What each worker wrote of a case; None of one that did not get so far."""
    files = [folder / f"{case}{rank}.json" for rank in range(num_workers)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]
