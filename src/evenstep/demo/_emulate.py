"""Workers of chosen speeds on equal cores: the real computing hides inside an emulated time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Emulation:
    """Makes a model take ``n * seconds_per_sample`` for its forward and backward over n samples.

    The model computes for real, then its backward waits, at the node that runs last, until that
    time has passed since the forward began. While a worker waits it leaves its core to the others,
    so two cores can play many workers. That is true to life as long as the real computing is the
    shorter part; steps where it was not are counted in ``num_late``.

    Nothing tells the policy: it sees a worker that takes its time.

    Args:
        model: the outermost module, not yet wrapped in DDP.
        first_layer: the part of it that every input passes first.
        seconds_per_sample: emulated time per sample, above 0.
        now: a monotonic clock in seconds.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        first_layer: nn.Module,
        seconds_per_sample: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.seconds_per_sample = seconds_per_sample
        self._now, self._sleep = now, sleep
        self.num_late = 0
        self._due_s = 0.0
        model.register_forward_pre_hook(self._begin)
        first_layer.register_forward_hook(self._pass)

    def _begin(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self._due_s = self._now() + len(inputs[0]) * self.seconds_per_sample

    def _pass(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        result: Tensor = _WaitInBackward.apply(output, self)  # type: ignore[no-untyped-call]
        return result

    def wait(self) -> None:
        """Sleep until the emulated time has passed."""
        left_s = self._due_s - self._now()
        if left_s > 0:
            self._sleep(left_s)
        else:
            self.num_late += 1


class _WaitInBackward(torch.autograd.Function):
    """Identity whose backward waits; autograd runs the nodes made first last."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, emulation: Emulation) -> Tensor:
        ctx.emulation = emulation
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.emulation.wait()
        return grads[0], None
