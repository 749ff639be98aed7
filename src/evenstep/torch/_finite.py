"""Whether a rank's loss was finite: told by the gradient that it sends into the model."""

from __future__ import annotations

import math
from collections import deque
from typing import final

import torch

from .._exchange._exchange import Exchange


@final
class Look:
    """A look at a tensor, whose sum is finite only if all of it is; read without a wait.

    On a device, the sum is copied into pinned memory on the stream that makes it, and an event
    tells when it is there: the host never waits for it.

    Args:
        tensor: a gradient, or a loss. Of one that is spread over ranks, this rank's part.

    Attributes:
        is_half: whether it is in half precision, where a loss scale may be too large.
    """

    __slots__ = ("_copied", "_total", "is_half")

    def __init__(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
            tensor = tensor.to_local()  # summing all of it would be a collective
        if tensor.is_complex():
            tensor = tensor.abs()
        kind = tensor.dtype
        self.is_half = kind == torch.float16
        self._copied: torch.cuda.Event | None = None
        wide = kind if kind == torch.float64 else torch.float32  # a sum in half may overflow
        total = tensor.sum(dtype=wide).detach()
        if total.is_cuda:
            self._total = torch.empty((), dtype=wide, pin_memory=True)
            self._total.copy_(total, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(total.device))
        else:
            self._total = total

    def is_finite(self) -> bool | None:
        """Return whether all of it is; None while a device has not got there."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        return math.isfinite(self._total.item())


@final
class FiniteWatch:
    """Tells rank 0 of each step in which this rank's loss was not finite.

    Args:
        exchange: carries the news.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._unread: deque[tuple[int, Look]] = deque()

    def note(self, step: int, looks: list[Look]) -> None:
        """Take over what a backward through a forward of ``step`` has seen."""
        self._unread.extend((step, look) for look in looks)
        looks.clear()  # there may be another backward through it

    def read(self) -> None:
        """Read what is known by now."""
        while self._unread:
            step, look = self._unread[0]
            is_finite = look.is_finite()
            if is_finite is None:
                return
            self._unread.popleft()
            if not is_finite:
                self._exchange.not_finite.tell(step, is_half=look.is_half)
