"""What the gradient that a loss sends into a model tells: is it finite, what does it divide by."""

from __future__ import annotations

import math
from collections import deque
from typing import final

import torch

from ..._exchange._exchange import Exchange
from ..._exchange._message_kinds import ScalesTold
from ..._run._step_under_way import StepUnderWay
from ._tickets import Ticket

# Scales are compared while that is new, and now and then, however late sizes begin to differ.
_EQUAL_STEPS = 8  # they show the noise
_UNEQUAL_STEPS = 64
_EVERY = 32
_CHUNK = 1 << 16  # elements that are copied at once, in the cache


@final
class Look:
    """A sum over a gradient or a loss, which a device may not have computed yet.

    From a device it is copied into pinned memory, on the stream that makes it, and an event tells
    when it is there: the host never waits for it.

    Args:
        total: the sum, of no dimensions.
        is_half: whether it is one of half precision, where a loss scale may be too large.
        output: which output of the model it shows the scale of; None if it shows none.
    """

    __slots__ = ("_copied", "_total", "is_half", "output")

    def __init__(self, total: torch.Tensor, *, is_half: bool, output: int | None) -> None:
        self.is_half = is_half
        self.output = output
        self._total = total.detach()
        self._copied: torch.cuda.Event | None = None
        if total.is_cuda:
            self._total = torch.empty((), dtype=total.dtype, pin_memory=True)
            self._total.copy_(total.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(total.device))

    def value(self) -> float | None:
        """Return the sum; None while a device has not got there."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        return float(self._total.item())


def look_at(tensor: torch.Tensor, looks: list[Look], *, output: int | None = None) -> None:
    """Look whether all of a gradient, or of a loss, is finite: its sum is not otherwise.

    Args:
        tensor: of one that is spread over ranks, this rank's part is looked at.
        looks: gets what is left to be told; nothing for what is known to be finite.
        output: which output it is of, to have the sum of its absolute values; None for its sum.
    """
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # summing all of it would be a collective
    if tensor.dtype.is_complex:
        tensor = tensor.abs()
    is_half = tensor.dtype == torch.float16
    kind = torch.float32 if tensor.dtype.itemsize == 2 else tensor.dtype  # half may overflow
    total = tensor.sum(dtype=kind) if output is None else _absolute(tensor, kind)
    if total.is_cuda or output is not None or not math.isfinite(total.item()):
        looks.append(Look(total, is_half=is_half, output=output))


def _absolute(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Return the sum of absolute values, without a copy of all of ``tensor``."""
    if tensor.device.type != "cpu":
        norm: torch.Tensor = torch.linalg.vector_norm(tensor, 1, dtype=kind)
        return norm
    if tensor.numel() <= _CHUNK:
        return tensor.abs().sum(dtype=kind)
    while len(tensor) == 1:
        tensor = tensor[0]
    num_rows = max(1, _CHUNK * len(tensor) // tensor.numel())  # torch's norm is 30 times as slow
    parts = torch.split(tensor, num_rows)
    return torch.stack([part.abs().sum(dtype=kind) for part in parts]).sum()


@final
class OutputWatch:
    """Tells rank 0 in which steps a loss was not finite, and of the scales of gradients.

    Args:
        exchange: carries the news.
        compares: whether scales are compared between ranks.

    Attributes:
        unread: what a device may not have computed yet, with its model and batch.
    """

    def __init__(self, exchange: Exchange, *, compares: bool) -> None:
        self._exchange = exchange
        self._compares = compares
        self._num_equal = self._num_unequal = 0
        self._step: StepUnderWay | None = None  # whose scales are collected
        self._scales: dict[tuple[int, int], dict[Ticket, float]] = {}
        self.unread: deque[tuple[int, Ticket, Look]] = deque()

    def begin_step(self, step: StepUnderWay) -> None:
        """Decide, alike on all ranks, whether the scales of a step are compared."""
        if not self._compares or step.plan is None:
            return
        if len(set(step.plan.batch_size)) == 1 and step.plan.costs is None:
            self._num_equal += 1
            step.compares = self._num_equal <= _EQUAL_STEPS
        else:
            self._num_unequal += 1
            step.compares = self._num_unequal <= _UNEQUAL_STEPS or not self._num_unequal % _EVERY

    def note(self, model: int, ticket: Ticket, looks: list[Look]) -> None:
        """Take over what a backward through a forward of ``ticket`` has seen."""
        self.unread.extend((model, ticket, look) for look in looks)
        looks.clear()  # there may be another backward through it

    def read(self) -> None:
        """Read what is known by now."""
        while self.unread:
            model, ticket, look = self.unread[0]
            value = look.value()
            if value is None:
                return
            self.unread.popleft()
            if not math.isfinite(value):
                self._exchange.not_finite.tell(ticket.step.number, is_half=look.is_half)
            elif look.output is not None and ticket.num_samples and value:
                self._collect(model, look.output, ticket, abs(value))

    def tell(self) -> None:
        """Send the scales of the step that is collected."""
        step, self._step = self._step, None
        scales, self._scales = self._scales, {}
        if step is None:
            return
        rows = []
        for (model, output), parts in scales.items():
            scale, size = (
                math.exp(math.fsum(map(math.log, values)) / len(parts))
                for values in (parts.values(), [max(part.amount, 1e-9) for part in parts])
            )
            rows.append((model, output, scale, size))
        self._exchange.tell([ScalesTold(step.number, tuple(rows))])

    def _collect(self, model: int, output: int, ticket: Ticket, scale: float) -> None:
        if ticket.step is not self._step:
            self.tell()
            self._step = ticket.step
        parts = self._scales.setdefault((model, output), {})
        parts[ticket] = parts.get(ticket, 0.0) + scale
