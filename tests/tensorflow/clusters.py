"""Clusters of TensorFlow's in processes of their own, as TF_CONFIG wants them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "examples" / "local_workers.py"
WORKER = Path(__file__).parent / "cases" / "worker.py"


def environment(**more):
    """A quiet one, without an accelerator, that finds this tree."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    return {**os.environ, "PYTHONPATH": path, **quiet, **more}


def start(folder, num_workers, *cases, **options):
    """Start workers that run the cases and write to ``folder``; return what runs them."""
    folder.mkdir()
    launcher = [LAUNCHER, str(num_workers)] if num_workers > 1 else []
    command = [sys.executable, *launcher, WORKER, folder, *cases]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment(), text=True, **pipes, **options)


def outcome(folder, case, num_workers, victim):
    """What the others wrote of a case that one worker does not come out of, which is ended."""
    process = start(folder, num_workers, case, start_new_session=True)
    others = [rank for rank in range(num_workers) if rank != victim]
    try:
        while process.poll() is None:
            results = found(folder, case, num_workers)
            if all(results[rank] is not None for rank in others):
                break
            time.sleep(0.2)
    finally:
        with suppress(ProcessLookupError):  # all have come out of it
            os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        print(said[-3000:])  # shown where the test fails, at its limit of time too
    results = found(folder, case, num_workers)
    assert all(results[rank] is not None for rank in others)
    return results


def found(folder, case, num_workers):
    """What each worker wrote of a case; None of one that did not get so far."""
    files = [folder / f"{case}{rank}.json" for rank in range(num_workers)]
    return [json.loads(file.read_text() or "null") if file.exists() else None for file in files]
