"""What the workers of the stop tests run: one is stopped, is killed, or hangs at a given point."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import torch

from benchmarks._fault_script import BOUNDS, train
from evenstep.exceptions import WorkerLostError
from evenstep.torch import Balancer, Runtime

IMPATIENT = Runtime(deadline_s=1.5, heartbeat_s=0.2, hang_s=2.0, line_every=None)
HANG = None  # in the place of a signal
LINGER_S = 60.0


def hang() -> None:
    """Never return, in Python."""
    while True:
        sleep(3600)


def struck(
    rank: int, folder: str, point: str, victim: int, sent: signal.Signals | None
) -> tuple[str, bool, float]:
    """Return what a rank ended with, whether its ``finally`` ran, and in how many seconds."""
    torch.manual_seed(0)
    # A job that a shell started in the background ignores it, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began_s, cleaned, told = monotonic(), False, "nothing happened"

    def strike(here: str) -> None:
        nonlocal began_s
        if here == point:
            began_s = monotonic()
            if rank == victim and sent is HANG:
                hang()
            elif rank == victim:
                os.kill(os.getpid(), sent)

    try:
        with Balancer(bounds=BOUNDS, runtime=IMPATIENT) as balancer:
            try:
                train(balancer, Path(folder), strike, buffers=True)
            finally:
                cleaned = True
    except WorkerLostError as error:
        told = str(error)
    return told, cleaned, monotonic() - began_s


def lingering(rank: int, point: str, victim: int) -> tuple[str, float]:
    """Return what a rank ended with, and in how many seconds; one raises, and does not leave.

    At the point, one rank leaves the run by an error, and goes on with work of its own.
    """
    torch.manual_seed(0)
    struck_s, told = monotonic(), "nothing happened"

    def strike(here: str) -> None:
        nonlocal struck_s
        if here == point:
            struck_s = monotonic()
            if rank == victim:
                raise ValueError("sample 17 has no label")

    try:
        with TemporaryDirectory() as folder, Balancer(bounds=BOUNDS, runtime=IMPATIENT) as balancer:
            train(balancer, Path(folder), strike, buffers=True)
    except ValueError:
        sleep(LINGER_S)
    except WorkerLostError as error:
        told = str(error)
    return told, monotonic() - struck_s
