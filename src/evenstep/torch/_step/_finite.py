"""Whether a rank's loss was finite: told by the gradient that it sends into the model."""

from __future__ import annotations

import math
from collections import deque
from typing import final

import torch

from ..._exchange._exchange import Exchange


@final
class Look:
    """A sum that is not finite, or that a device may find not to be.

    From a device it is copied into pinned memory, on the stream that makes it, and an event tells
    when it is there: the host never waits for it.

    Args:
        total: the sum, of no dimensions.
        is_half: whether it is one of half precision, where a loss scale may be too large.
    """

    __slots__ = ("_copied", "_total", "is_half")

    def __init__(self, total: torch.Tensor, *, is_half: bool) -> None:
        self.is_half = is_half
        self._total = total.detach()
        self._copied: torch.cuda.Event | None = None
        if total.is_cuda:
            self._total = torch.empty((), dtype=total.dtype, pin_memory=True)
            self._total.copy_(total.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(total.device))

    def is_finite(self) -> bool | None:
        """Return whether it is; None while a device has not got there."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        return math.isfinite(self._total.item())


def look_at(tensor: torch.Tensor, looks: list[Look]) -> None:
    """Look whether all of a gradient, or of a loss, is finite: its sum is not otherwise.

    Args:
        tensor: of one that is spread over ranks, this rank's part is looked at.
        looks: gets what is left to be told; nothing for what is known to be finite.
    """
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # summing all of it would be a collective
    if tensor.dtype.is_complex:
        tensor = tensor.abs()
    is_half = tensor.dtype == torch.float16
    total = tensor.sum(dtype=torch.float32) if is_half else tensor.sum()  # half may overflow
    if total.is_cuda or not math.isfinite(total.item()):
        looks.append(Look(total, is_half=is_half))


@final
class FiniteWatch:
    """Tells rank 0 of each step in which this rank's loss was not finite.

    Args:
        exchange: carries the news.

    Attributes:
        unread: what a device may not have computed yet, with the number of its step.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.unread: deque[tuple[int, Look]] = deque()

    def note(self, step: int, looks: list[Look]) -> None:
        """Take over what a backward through a forward of ``step`` has seen."""
        self.unread.extend((step, look) for look in looks)
        looks.clear()  # there may be another backward through it

    def read(self) -> None:
        """Read what is known by now."""
        while self.unread:
            step, look = self.unread[0]
            is_finite = look.is_finite()
            if is_finite is None:
                return
            self.unread.popleft()
            if not is_finite:
                self._exchange.not_finite.tell(step, is_half=look.is_half)
