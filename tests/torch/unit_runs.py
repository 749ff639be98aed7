"""What the workers of the other unit tests run: order of events, faults, running statistics."""

from __future__ import annotations

import inspect
import os
import signal
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.exceptions import EvenstepWarning, WorkerLostError
from evenstep.torch import Balancer, Runtime

from .plans import Restless

QUIET = Runtime(line_every=None)
WATCHFUL = Runtime(line_every=None, heartbeat_s=0.2, deadline_s=6.0)


def numbered(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(4.0 * num_samples).reshape(num_samples, 4))


def forward_first(rank: int) -> float:
    """Return a weight in which rank 1 counts its batch only after rank 0's forward is done.

    If the forward waited for the count, both would wait for ever.
    """
    group = dist.new_group([0, 1])
    word = torch.zeros(1)

    def unit(batch: Any) -> float:
        if rank == 1:
            dist.recv(word, src=0, group=group)
        return 1.0 + 2.0 * rank

    module = nn.Linear(4, 1, bias=False)
    with Balancer(unit=unit, runtime=QUIET) as balancer:
        model, loader = balancer.prepare(
            DistributedDataParallel(module), DataLoader(numbered(4), batch_size=2)
        )
        for (x,) in loader:
            output = model(torch.ones_like(x))
            if rank == 0:
                dist.send(word, dst=1, group=group)
            output.mean().backward(torch.tensor(1.0 if rank == 0 else 0.0))
    return float(module.weight.grad[0, 0])  # u / U of rank 0: its W goes with DDP's mean


def die_while_counting(rank: int, how: str) -> tuple[str, int]:
    """Return what the others are told when rank 1 never tells its units of step 2."""
    num_counted = 0

    def unit(batch: Any) -> float:
        nonlocal num_counted
        num_counted += 1
        if (rank, num_counted) == (1, 3):  # the step before has a collective in DDP's forward
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("a bug in the user's count")
        return 1.0

    try:
        with Balancer(unit=unit, runtime=WATCHFUL) as balancer:
            model = DistributedDataParallel(nn.Linear(4, 1))
            model, loader = balancer.prepare(model, DataLoader(numbered(48), batch_size=4))
            for (x,) in loader:
                model(x).mean().backward()
    except WorkerLostError as error:
        return str(error), error.rank
    except ArithmeticError as error:
        return str(error), rank
    return "nothing happened", -1


def leave_while_counting(rank: int) -> tuple[str, int]:
    """Return what the others are told when a rank leaves the loop before its third step."""
    try:
        with Balancer(unit=lambda batch: 1.0, runtime=WATCHFUL) as balancer:
            model = DistributedDataParallel(nn.Linear(4, 1))
            model, loader = balancer.prepare(model, DataLoader(numbered(48), batch_size=4))
            for step, (x,) in enumerate(loader):
                model(x).mean().backward()
                if (rank, step) == (1, 1):
                    break
    except WorkerLostError as error:
        return str(error), error.rank
    return "left", rank


def running_stats(rank: int, broadcast: bool) -> dict[str, Any]:
    """Return a layer's statistics before and after they were averaged, and samples since then."""
    warnings.simplefilter("ignore", EvenstepWarning)
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    model = DistributedDataParallel(nn.Sequential(norm, nn.Linear(4, 1)), **{name: broadcast})
    counts = []
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        samples = TensorDataset(torch.randn(7 * 15, 4))
        model, loader = balancer.prepare(model, DataLoader(samples, batch_size=5))
        for step, (x,) in enumerate(loader):
            if step == 4:
                balancer.average_buffers()
                counts.clear()
            model(x + 100.0 * rank).mean().backward()
            counts.append(len(x))
        before = torch.cat([norm.running_mean, norm.running_var]).double()
        balancer.average_buffers()
        after = torch.cat([norm.running_mean, norm.running_var]).double()
        balancer.average_buffers()
        again = torch.cat([norm.running_mean, norm.running_var]).double()
        tracked = int(norm.num_batches_tracked)
    return {
        "before": before,
        "after": after,
        "again": again,
        "counts": counts,
        "tracked": tracked,
    }


def nothing_to_average(rank: int) -> str:
    try:
        Balancer(runtime=QUIET).average_buffers()
    except RuntimeError as error:
        return str(error)
    return "no error"
