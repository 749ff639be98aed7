"""What the workers of the stop tests run: one is stopped, is killed, or hangs at a given point."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

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


class Stalling(Dataset):
    """Samples of which a loader worker of rank 0 reads 24, and no more."""

    def __init__(self) -> None:
        self.count = 0

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += get_worker_info() is not None and os.environ["RANK"] == "0"
        if self.count > 24:
            threading.Event().wait()
        return torch.full((4,), float(index))


def lose_one_while_waiting_for_input(rank: int) -> str:
    """Rank 1 dies while rank 0 waits for its loader worker; return the error of rank 0."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    try:
        with Balancer(policy="equal", runtime=IMPATIENT) as balancer:
            stock = DataLoader(Stalling(), batch_size=4, num_workers=1)
            model, loader = balancer.prepare(model, stock)
            for step, x in enumerate(loader):
                if (rank, step) == (1, 6):
                    os.kill(os.getpid(), signal.SIGKILL)
                model(x).sum().backward()
    except WorkerLostError as error:
        return str(error)
    return "nothing happened"


def destroy_the_group(rank: int) -> str:
    """Rank 1 destroys its default group, and trains on without the script's barrier."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    dataset = TensorDataset(torch.randn(96, 4))
    try:
        with Balancer(policy="equal", runtime=IMPATIENT) as balancer:
            model, loader = balancer.prepare(model, DataLoader(dataset, batch_size=4))
            for step, (x,) in enumerate(loader):
                model(x).sum().backward()
                if (rank, step) == (1, 3):
                    dist.destroy_process_group()
                if dist.is_initialized():
                    dist.barrier()
    except WorkerLostError as error:
        return str(error)
    return "nothing happened"
