"""Run one rival once: start its four workers, and print what they found as JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

import torch

from benchmarks._digits import shuffled_digits
from benchmarks.rivals._figures import figures
from benchmarks.rivals._task import WORLD_SIZE

HERE = Path(__file__).parent
GRACE_S = 10.0
"""How long workers may take to end once all of them have left what they found."""


def main() -> None:
    """`python -m benchmarks.rivals._launch PYTHON SCRIPT SETTING`; the setting is JSON."""
    python, script, setting = sys.argv[1:]
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "setting.json").write_text(setting, "utf-8")
        write_digits(folder / "digits.pt")
        workers = start(python, HERE / script, folder)
        wait_for(workers, folder)
        ranks = [
            json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)
        ]
    print(json.dumps(figures(ranks)), flush=True)
    if os.getpgrp() == os.getpid():  # as a cell; else they are others' too
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)  # processes that workers started, and left


def write_digits(path: Path) -> None:
    """Write scikit-learn's digits, shuffled, so that rivals need not have it."""
    x, y = shuffled_digits()
    torch.save({"x": x, "y": y}, path)


def start(python: str, script: Path, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the workers; what they print goes to standard error."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    paths = str(HERE.parents[1]), os.environ.get("PYTHONPATH")  # of `benchmarks._digits`
    told["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return [
        subprocess.Popen(
            [python, str(script), str(folder), str(rank)],
            env={**os.environ, **told},
            stdout=sys.stderr,
        )
        for rank in range(WORLD_SIZE)
    ]


def wait_for(workers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Return when all workers have left what they found; then none of them runs any more.

    Raises:
        SystemExit: a worker ended before.
    """
    left = [folder / f"rank{rank}.json" for rank in range(WORLD_SIZE)]
    while not all(path.exists() for path in left):
        for rank, worker in enumerate(workers):
            if worker.poll() is not None and not left[rank].exists():
                sleep(1.0)  # for the errors of the others
                for each in workers:
                    each.kill()
                sys.exit(f"worker {rank} ended with status {worker.returncode}")
        sleep(0.1)
    for worker in workers:
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()


if __name__ == "__main__":
    main()
