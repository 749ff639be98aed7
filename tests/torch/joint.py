"""Training whose sizes and shares are both drawn anew, by planners that are made up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from evenstep import Cluster, Decision, StepTimings
from evenstep._exchange._jointly import Jointly
from evenstep.control import Computing, ShareOutcome
from evenstep.policies import AbstractPolicy
from evenstep.sharding import Links
from evenstep.torch import Balancer, Network

from .networks import QUIET, WIDTH, DrawnShares, make_model

HUGE_S, NUM_STEPS = 1000.0, 20


class LinkedShares(DrawnShares):
    """Draws shares whenever the last ones have been used, and knows links."""

    links = Links(np.full(3, 1e6))

    def observe(self, step: int, exchange: Any, *, next_step: int) -> ShareOutcome:
        if exchange.plan_epoch != self.plan.epoch:
            return ShareOutcome(self.plan, ())
        return super().observe(step, exchange, next_step=next_step)


class Turning:
    """Has another rank's batch make up for an age after every exchange."""

    def __init__(self) -> None:
        self.extra_s = np.zeros(3)
        self.computed: list[Computing | None] = []

    def observe(self, step: int, computing: Any, links: Any, shares: Any) -> tuple[()]:
        self.computed.append(computing)
        self.extra_s = HUGE_S * (np.arange(3) == len(self.computed) % 3)
        return ()


@final
@dataclass(frozen=True)
class Sparing(AbstractPolicy[int]):
    """Gives one sample to whoever takes an age, as it is shown."""

    name = "sparing"

    def init(self, cluster: Cluster) -> Decision[int]:
        return Decision(np.array([5, 5, 5]), 0, "start")

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        slow = timings.compute_s > HUGE_S / 2
        return Decision(np.where(slow, 1, 7) if slow.any() else np.array([5, 5, 5]), 0, "spared")


def trained_jointly(rank: int, network: Network | None) -> Any:
    """Return parameters, sizes and epochs of shares at every step, and what was computed."""
    torch.manual_seed(1)
    samples = torch.randn(15 * NUM_STEPS, WIDTH, dtype=torch.float64)
    model = make_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stock, turning = DataLoader(TensorDataset(samples), batch_size=5), Turning()
    sizes, epochs = [], []
    with Balancer(policy=Sparing(), runtime=QUIET, network=network) as balancer:
        wrapped, loader = balancer.prepare(model, stock)
        for (x,) in loader:
            if network is not None and rank == 0 and not sizes:
                turn(balancer, turning)
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append((balancer.batch_sizes, len(x)))
            reduction = balancer._reduction
            split = None if reduction is None else reduction.reducer.split
            epochs.append(None if split is None else split.epoch)
    parameters = torch.cat([p.detach().ravel() for p in model.parameters()])
    return parameters.tolist(), sizes, epochs, sum(one is not None for one in turning.computed)


def turn(balancer: Balancer, turning: Turning) -> None:
    """Put the made-up planners in the place of the real ones."""
    exchange = balancer._session.exchange
    shares: Any = exchange.shares
    shares._planner = LinkedShares(3)
    shares._jointly = Jointly(turning, exchange.decisions, shares._emit)


def default_jointly(rank: int, joint: bool) -> bool:
    """Return whether sizes are planned with shares by what a user asks for."""
    stock = DataLoader(TensorDataset(torch.randn(30, WIDTH)), batch_size=5)
    with Balancer(runtime=QUIET, network=Network(probe=False, joint=joint)) as balancer:
        model, loader = balancer.prepare(make_model(torch.float32), stock)
        for (x,) in loader:
            model(x).mean().backward()
        return balancer._session.exchange.shares._jointly is not None
