"""What the workers of the fault tests of the sharded optimizer run."""

from __future__ import annotations

import signal
from time import monotonic

import torch
from torch import nn, optim

from evenstep.exceptions import WorkerLostError
from evenstep.network.torch import ShardedOptimizer

from ..reduce.faults import Dying, threads_left
from .runs import split_of


def train(
    rank: int, sent: signal.Signals, timeout_s: float, act: str
) -> tuple[str, int, float, str, str]:
    """Return what ended training here, whom it names, when, threads left, and what comes then."""
    model = nn.Linear(200, 200)
    optimizer = ShardedOptimizer(
        optim.AdamW(model.parameters()), split_of([1, 1, 1]), timeout_s=timeout_s
    )
    began_s = monotonic()
    text, named = "nothing happened", -1
    try:
        for step in range(8):
            if step == 2 and rank == 1:
                carrier = optimizer._carrier
                assert carrier is not None
                carrier._transport = Dying(carrier._transport, 9, sent)
            began_s = monotonic()
            _turn(model, optimizer, act, step)
    except WorkerLostError as error:
        text, named = str(error), error.rank
    seconds = monotonic() - began_s
    try:
        _turn(model, optimizer, "step", 9)
    except WorkerLostError as error:
        again = str(error)
    return text, named, seconds, threads_left(), again


def _turn(model: nn.Module, optimizer: ShardedOptimizer, act: str, step: int) -> None:
    if act == "replan" and step > 1:
        optimizer.replan(split_of([1 + step % 2, 1, 2 - step % 2], step))
        return
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


class Failing(optim.SGD):
    """An optimizer that fails."""

    def step(self, closure: object = None) -> None:
        raise ZeroDivisionError("in the optimizer")


def fail(rank: int) -> tuple[str, str]:
    """Have rank 1's optimizer fail; return the error."""
    model = nn.Linear(200, 200)
    kind = Failing if rank == 1 else optim.SGD
    optimizer = ShardedOptimizer(
        kind(model.parameters(), lr=0.1), split_of([1, 1, 1]), element_wise=True, timeout_s=20
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except (WorkerLostError, ZeroDivisionError) as error:
        return type(error).__name__, str(error)
    return "nothing happened", ""
