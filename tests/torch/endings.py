"""Scripts that end in every way but the right one: run as ``python endings.py <how>``.

Prints the threads of evenstep's that are alive when everything that runs at exit has run.
"""

from __future__ import annotations

import atexit
import os
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
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from evenstep.torch import Balancer, Runtime  # noqa: E402


def main(how: str) -> None:
    """Train a little and leave: "prepared", "workers" or "error"."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same data on every rank
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
