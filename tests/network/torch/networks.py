"""Training with gradients summed by shares."""

# Without `from __future__ import annotations`: DDP compares a hook's annotations with types.

import os
import signal
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep import Cluster, Decision, StepTimings
from evenstep.events import Event, ExchangeMeasured, SharesPlanned
from evenstep.exceptions import WorkerLostError
from evenstep.network import Split
from evenstep.network._following._share_planner import SharesInForce
from evenstep.policies import AbstractPolicy, Fixed
from evenstep.torch import Balancer, Network, Runtime

WIDTH, NUM_STEPS = 64, 12
QUIET = Runtime(line_every=None)


class DrawnShares:
    """A planner that draws shares anew after every exchange; every third is plain all-reduce."""

    links = None  # it follows none

    def __init__(self, world_size: int) -> None:
        self.plan = SharesInForce(0, 0, None, None, "begin")
        self.seen: list[tuple[int, Any]] = []
        self._world_size = world_size

    def observe(self, step: int, exchange: Any, *, next_step: int) -> list[Event]:
        self.seen.append((step, exchange))
        epoch = self.plan.epoch + 1
        parts = None
        if epoch % 3:
            draw = torch.Generator().manual_seed(epoch)
            shares = torch.rand(self._world_size, generator=draw, dtype=torch.float64)
            shares[epoch % self._world_size] = 0.0
            parts = Split.of((shares / shares.sum()).numpy()).parts
        self.plan = SharesInForce(epoch, next_step, parts, None, "drawn")
        return []


@final
@dataclass(frozen=True)
class Turning(AbstractPolicy[int]):
    """Hands each rank's batch size on to the next rank after every step."""

    sizes: tuple[int, ...]
    name = "turning"

    def init(self, cluster: Cluster) -> Decision[int]:
        return Decision(np.array(self.sizes), 0, "begin")

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        return Decision(np.roll(self.sizes, state + 1), state + 1, "turned")


def draw_shares(balancer: Balancer, num_ranks: int) -> DrawnShares:
    """Have shares drawn anew after every exchange, on rank 0 in its first step."""
    planner = DrawnShares(num_ranks)
    assert balancer._parts.reduction is not None
    assert balancer._parts.reduction.shares is not None
    balancer._parts.reduction.shares._planner = planner  # type: ignore[assignment]
    return planner


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    return nn.Sequential(*layers).to(dtype)


def trained(rank: int, network: Network | None, sizes: tuple[int, ...], draws: bool) -> Any:
    """Return parameters, plans in force, events, bytes sent and sizes after some steps in fp64.

    With ``draws``, sizes and shares are both drawn anew again and again.
    """
    events: list[Event] = []
    torch.manual_seed(1)
    samples = torch.randn(sum(sizes) * NUM_STEPS, WIDTH, dtype=torch.float64)
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epochs, planned = [], []
    stock = DataLoader(TensorDataset(samples), batch_size=sum(sizes) // len(sizes))
    with Balancer(
        policy=Turning(sizes) if draws else Fixed(sizes),
        runtime=Runtime(line_every=None, hooks=(events.append,)),
        network=network,
    ) as balancer:
        wrapped, loader = balancer.prepare(model, stock)
        for (x,) in loader:
            if draws and rank == 0 and not epochs:
                draw_shares(balancer, len(sizes))
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            split = (
                None
                if balancer._parts.reduction is None
                else balancer._parts.reduction.reducer.split
            )
            epochs.append(None if split is None else split.epoch)
            planned.append((balancer.batch_sizes, len(x)))
        sent = (
            0 if balancer._parts.reduction is None else balancer._parts.reduction.reducer.sent_bytes
        )
    parameters = torch.cat([p.detach().ravel() for p in model.parameters()])
    told = [event for event in events if isinstance(event, SharesPlanned)]
    return parameters.tolist(), epochs, told, sent, planned


def accumulated(rank: int, every: int) -> tuple[list[ExchangeMeasured], list[SharesPlanned]]:
    """Return the exchanges and the plans, where only one step of ``every`` has an exchange."""
    events: list[Event] = []
    stock = DataLoader(TensorDataset(torch.randn(3 * 32 * NUM_STEPS, WIDTH)), batch_size=4)
    runtime = Runtime(line_every=None, hooks=(events.append,))
    with Balancer(policy=Fixed((4, 4, 4)), runtime=runtime, network=Network()) as balancer:
        model, loader = balancer.prepare(make_model(torch.float32), stock)
        for i, (x,) in enumerate(loader):
            with nullcontext() if (i + 1) % every == 0 else model.no_sync():
                (model(x).square().mean() / every).backward()
    measured = [event for event in events if isinstance(event, ExchangeMeasured)]
    return measured, [event for event in events if isinstance(event, SharesPlanned)]


def trained_twice(rank: int, network: Network | None) -> tuple[list[float], list[int]]:
    """Return a model's parameters after two balancers and a step of its own, and bytes of each."""
    torch.manual_seed(1)
    samples = torch.randn(3 * 4 * NUM_STEPS, WIDTH, dtype=torch.float64)
    model = DistributedDataParallel(make_model(torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def learn(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    sent = []
    for _ in range(2):
        stock = DataLoader(TensorDataset(samples), batch_size=4)
        with Balancer(policy=Fixed((2, 4, 6)), runtime=QUIET, network=network) as balancer:
            _, loader = balancer.prepare(model, stock)
            for i, (x,) in enumerate(loader):
                if network is not None and rank == 0 and i == 0:
                    draw_shares(balancer, 3)
                learn(x)
            reduction = balancer._parts.reduction
            sent.append(0 if reduction is None else reduction.reducer.sent_bytes)
    learn(samples[4 * rank : 4 * rank + 4])
    return torch.cat([p.detach().ravel() for p in model.parameters()]).tolist(), sent


def named(rank: int) -> int | None:
    """Return who is lost by a balancer over ranks 1 to 3, whose own rank 2 keeps others waiting."""
    ranks = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    stock = DataLoader(TensorDataset(torch.randn(16, WIDTH)), batch_size=4)
    try:
        runtime = Runtime(process_group=ranks)
        with Balancer(network=Network(), runtime=runtime) as balancer:
            balancer.prepare(make_model(torch.float32), stock)
            assert balancer._parts.reduction is not None
            balancer._parts.reduction.reducer._give_up(2, 1800.0)
            balancer._parts.reduction.reducer.settle()
    except WorkerLostError as error:
        return error.rank
    return None


def bereft(rank: int, number: signal.Signals) -> str:
    """Rank 2 goes in the middle of a backward by shares; return what the others are told."""
    torch.manual_seed(1)
    stock = DataLoader(TensorDataset(torch.randn(160, WIDTH)), batch_size=4)
    watchful = Runtime(deadline_s=2.0, heartbeat_s=0.2, line_every=None)
    network = Network()
    try:
        with Balancer(runtime=watchful, network=network) as balancer:
            model, loader = balancer.prepare(make_model(torch.float32), stock)
            for (x,) in loader:
                loss = model(x).square().mean()
                assert balancer._parts.reduction is not None
                split = balancer._parts.reduction.reducer.split
                if split is not None and rank == 2:
                    os.kill(os.getpid(), number)
                loss.backward()
    except WorkerLostError as error:
        return str(error)
    return "nothing"


def refused(rank: int) -> list[str]:
    """Return what is said of models whose gradients nobody can share out."""
    told = []
    stock = DataLoader(TensorDataset(torch.randn(16, WIDTH)), batch_size=4)
    hooked = DistributedDataParallel(make_model(torch.float32))
    hooked.register_comm_hook(None, own_hook)
    sharded = make_model(torch.float32)
    fully_shard(sharded)
    layers = OrderedDict(embedding=nn.Embedding(8, 4, sparse=True), head=nn.Linear(4, 1))
    for model in (hooked, sharded, nn.Sequential(layers)):
        with Balancer(network=Network()) as balancer:
            try:
                balancer.prepare(model, stock)
            except ValueError as error:
                told.append(str(error))
    return told


def own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Do nothing with the bucket."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
