"""Epochs under plans by cost that change at every step, saved in the middle and gone on with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from evenstep.torch import Balancer, Checkpoint, Cost, Runtime

from .cost_runs import Masked, Series, loss_of, padded

BATCH_SIZE, NUM_STEPS, NUM_EPOCHS = 24, 51, 4  # the short last step has fewer samples than 3 ranks
STOP_AFTER = 76  # in the middle of the second epoch
LENGTH = np.random.default_rng(8).integers(2, 60, (NUM_STEPS - 1) * BATCH_SIZE + 2)
CAP = 3 * int(LENGTH.max())


@dataclass(frozen=True)
class Loop:
    """A training loop as people write it.

    Attributes:
        cost: of the samples.
        accumulated: batches of an optimizer step, in a plain loop.
    """

    cost: Cost
    accumulated: int = 1


LOOPS = {
    "plain": Loop(Cost(LENGTH, padded=False)),
    "accumulated": Loop(Cost(LENGTH, padded=True), accumulated=2),
    "capped forwards": Loop(Cost(LENGTH, padded=False, max_size=CAP)),
    "capped padded forwards": Loop(Cost(LENGTH, padded=True, max_size=CAP, max_samples=5)),
}


class Restless:
    """Plans other costs after every step, whatever was measured.

    Args:
        planner: whose place it takes before the first report.
    """

    claims = None
    is_behind = False
    hold = 1

    def __init__(self, planner: Any) -> None:
        self._planner = planner
        self.plan = planner.plan

    def observe(self, reports: Any, *, next_step: int, ask: bool = True) -> Any:
        plan = self.plan
        rng = np.random.default_rng(plan.epoch)
        slope = rng.integers(1, 1000, (len(reports), 3)).tolist()
        costs = replace(plan.costs, slope=tuple(map(tuple, slope)))
        self.plan = replace(plan, epoch=plan.epoch + 1, first_step=next_step, costs=costs)
        return ()

    def catch_up(self, *, next_step: int, ask: bool = True) -> Any:
        return ()

    def account(self, reports: Any, plan: Any) -> None:
        return None

    def burden(self, step: int) -> None:
        return None

    def learnt(self) -> Any:
        return self._planner.learnt()


@dataclass
class Trained:
    """What a rank, or one process, has at the end.

    Attributes:
        parameters: all in one.
        seen: indices of the samples that it computed in each step.
        largest: tokens of its largest forward, padding included where there is some.
    """

    parameters: torch.Tensor
    seen: list[list[int]]
    largest: int = 0


def legs(rank: int, world_size: int, wanted: list[tuple[str, str, int | None]]) -> list[Trained]:
    """Train some legs one after the other: a loop's name, a folder, and where to stop."""
    return [leg(LOOPS[name], rank, world_size, Path(at), stop) for name, at, stop in wanted]


def leg(loop: Loop, rank: int, world_size: int, folder: Path, stop: int | None) -> Trained:
    """Go on from a folder's checkpoint, if it has one; save where to stop."""
    model: Any = Masked()
    with Balancer(cost=loop.cost, runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, _loader(BATCH_SIZE // world_size))
        optimizer = _optimizer(model)
        checkpoint = Checkpoint(folder, model=model, optimizer=optimizer, loader=loader)
        first = checkpoint.load() or 0
        found = Trained(torch.empty(0), [])
        for number, step in islice(enumerate(_steps(loop, loader), first + 1), stop):
            if number == first + 1 and rank == 0:
                decisions = balancer._session.exchange.decisions
                decisions.planner = Restless(decisions.planner)
            found.seen.append([])
            for batch in step:
                (loss_of(model, batch, tokens=False) / loop.accumulated).backward()
                if balancer.num_samples:
                    found.seen[-1] += batch[0].tolist()
                rows = batch[2]
                size = rows.numel() if loop.cost.padded else int(rows.sum())
                found.largest = max(found.largest, size)
            if number % loop.accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()
        checkpoint.save(first + len(found.seen))
    return replace(found, parameters=_flat(model))


def alone(accumulated: int) -> Trained:
    """Train in one process, without evenstep."""
    model, found = Masked(), Trained(torch.empty(0), [])
    loader, optimizer = _loader(BATCH_SIZE), _optimizer(model)
    every = (batch for _ in range(NUM_EPOCHS) for batch in loader)
    for number, batch in enumerate(every, 1):
        (loss_of(model, batch, tokens=False) / accumulated).backward()
        found.seen.append(batch[0].tolist())
        if number % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    return replace(found, parameters=_flat(model))


def _steps(loop: Loop, loader: Any) -> Any:
    """Yield the steps that are left of all epochs."""
    while (epochs := loader.state_dict()["epochs_begun"]) < NUM_EPOCHS or (
        loader.state_dict()["steps_taken"] < NUM_STEPS and epochs == NUM_EPOCHS
    ):
        yield from loader.steps() if loop.cost.is_capped else ([batch] for batch in loader)


def _loader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        Series(LENGTH), batch_size, shuffle=True, collate_fn=padded, generator=generator
    )


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
