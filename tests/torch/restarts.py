"""Runs that end and begin again, for the tests of what a balancer remembers and how it stops."""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import EstimatesRestored
from evenstep.torch import Balancer, Checkpoint, Drain, Runtime

from .matrix import QUIET, samples
from .runs import Sleepy
from .sharded import SlowNet

EACH_STEP = "lb-bsp-2018"  # a policy that is shown each step, however short


def speeds(rank: int, state: dict[str, Any] | None, slow: int) -> tuple[Any, ...]:
    """Train some steps with one slow worker; return state, sizes of every step, and events."""
    events: list[Any] = []
    model = Sleepy(0.006 if rank == slow else 0.001)
    sizes = []
    with Balancer(24, runtime=Runtime(line_every=None, hooks=(events.append,))) as balancer:
        if state is not None:
            balancer.load_state_dict(state)
        stock = DataLoader(TensorDataset(torch.randn(24 * 12, 4)), batch_size=12)
        model, loader = balancer.prepare(model, stock)
        for (x,) in loader:
            sizes.append(balancer.batch_sizes)
            model(x).mean().backward()
        state = balancer.state_dict()
    return state, sizes, [e for e in events if isinstance(e, EstimatesRestored)]


def drained(
    rank: int, folder: str, told: int, at_step: int, policy: str = EACH_STEP
) -> tuple[list[int], int | None]:
    """Be sent SIGTERM in a step; return which steps ran, and what was loaded.

    Args:
        rank: this process.
        folder: of the checkpoints.
        told: the rank that gets the notice.
        at_step: the step in which it gets it; -1 is before the first.
        policy: decides the sizes.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    stock = DataLoader(TensorDataset(torch.randn(8 * 120, 4)), batch_size=8 // world_size)
    steps = []
    quiet = Runtime(line_every=None)
    with Balancer(8, policy=policy, runtime=quiet) as balancer, Drain(balancer) as drain:
        plain = nn.Linear(4, 4)
        model, loader = balancer.prepare(plain, stock)
        parts = {"model": model, "loader": loader, "balancer": balancer}
        checkpoint = Checkpoint(Path(folder), **parts)
        begun = checkpoint.load()
        step = begun or 0
        if (rank, at_step) == (told, -1):
            os.kill(os.getpid(), signal.SIGTERM)
        for (x,) in loader:
            if (rank, step) == (told, at_step):
                os.kill(os.getpid(), signal.SIGTERM)
            model(x).mean().backward()
            steps.append(step)
            step += 1
            if drain.requested:
                checkpoint.save(step)
                break
    return steps, begun


def bereft(rank: int, folder: str) -> None:
    """Rank 1 is killed; rank 0, busy with something else, is told to end."""
    logging.getLogger("evenstep").addHandler(logging.FileHandler(f"{folder}/{rank}.log"))
    watchful = Runtime(deadline_s=1.5, heartbeat_s=0.2, line_every=None)
    stock = DataLoader(TensorDataset(torch.randn(48, 4)), batch_size=4)
    with Balancer(runtime=watchful) as balancer, Drain(balancer):
        model, loader = balancer.prepare(nn.Linear(4, 4), stock)
        for step, (x,) in enumerate(loader):
            model(x).mean().backward()
            if step == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(15)  # nothing that a lost worker would end


def drained_by_four(rank: int) -> list[tuple[int, bool]]:
    """Return each step of two by two ranks and whether it was to be the last; rank 3 is told.

    Nobody leaves before six more steps, so that the test cannot hang.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = SlowNet(0.0)
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    group = mesh["dp"].get_group()
    found = []
    runtime = replace(QUIET, process_group=group)
    with Balancer(policy=EACH_STEP, runtime=runtime) as balancer, Drain(balancer) as drain:
        stock = DataLoader(samples(torch.float64), batch_size=6)
        model, loader = balancer.prepare(model, stock)
        for step in loader.steps():
            if rank == 3 and len(found) == 2:
                signal.raise_signal(signal.SIGTERM)
            for part, classes in step:
                functional.cross_entropy(model(part), classes).backward()
            found.append((len(found), drain.requested))
    return found
