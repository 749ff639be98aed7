"""Scripts that end in every way but the right one: run as ``python endings.py <how>``.

Prints the threads of evenstep's that are alive when everything that runs at exit has run.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading


def report() -> None:
    """Print what is left; registered first, so it runs last."""
    names = [thread.name for thread in threading.enumerate()]
    print("left:", sorted(name for name in names if name.startswith("evenstep")), flush=True)


atexit.register(report)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info  # noqa: E402

from evenstep.torch import Balancer, Runtime  # noqa: E402


class Stuck(Dataset):
    """Samples of which rank 1's loader worker never reads the last ones."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 32 and get_worker_info() is not None and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.full((4,), float(index))


def wait_for_a_stuck_worker(how: str) -> None:
    """Train with a loader worker that reads no more: of the loader, or of one of the script's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runtime = Runtime(deadline_s=5, heartbeat_s=0.3, hang_s=2, line_every=None)
    own = DataLoader(Stuck(), batch_size=4, num_workers=1)
    ours = own if how == "stuck worker" else DataLoader(Stuck(), batch_size=4)
    with Balancer(runtime=runtime) as balancer:
        model, loader = balancer.prepare(nn.Linear(4, 4), ours)
        more = iter(own) if ours is not own else None
        for x in loader:
            if more is not None:
                next(more)
            model(x).mean().backward()


def fork(how: str) -> None:
    """Fork in the middle of a step; the child ends as ``how`` says, and is waited for."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    if how == "fork twice" and os.fork():
        os._exit(0)
    elif how == "fork error":
        raise KeyError("a mistake in a child")
    sys.exit(0)


def train_beside_children(how: str) -> None:
    """Train to the end, and say so."""
    runtime = Runtime(heartbeat_s=0.2, line_every=None)
    with Balancer(runtime=runtime) as balancer:
        stock = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
        model, loader = balancer.prepare(nn.Linear(4, 4), stock)
        for step, (x,) in enumerate(loader):
            model(x).mean().backward()
            if step % 3 == 1:
                fork(how)
        print("trained", step, flush=True)


def main(how: str) -> None:
    """Train a little and leave: "prepared", "workers" or "error"."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same data on every rank
    if how.startswith("stuck"):
        wait_for_a_stuck_worker(how)
        return
    if how.startswith("fork"):
        train_beside_children(how)
        return
    dataset = TensorDataset(torch.randn(64, 4))
    stock = DataLoader(dataset, batch_size=4, num_workers=1 if how == "workers" else 0)
    hooks = (lambda event: None,)
    balancer = Balancer(runtime=Runtime(line_every=None, hooks=hooks))
    model, loader = balancer.prepare(nn.Linear(4, 4), stock)
    if how == "prepared":
        return
    for step, (x,) in enumerate(loader):
        model(x).mean().backward()
        if step == 0 and rank == 0:
            names = {thread.name for thread in threading.enumerate()}
            print("there:", sorted(name for name in names if name.startswith("evenstep")))
        if step == 3 and how == "error":
            raise KeyError("a mistake of the user's")
        if step == 3 and how == "workers":
            kept.append(iter(loader))  # an iteration that is still referred to
            next(kept[0])
            return


kept: list[object] = []

if __name__ == "__main__":
    main(sys.argv[1])
