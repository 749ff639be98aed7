"""Memory for what is under way: a few buffers, used again and again."""

from __future__ import annotations

from typing import final

import torch

Key = tuple[torch.dtype, torch.device, bool]


@final
class Buffers:
    """Flat buffers that are given back: as many of a kind as were ever out at once.

    Each grows to the largest that was asked of it. On the issuing thread alone.
    """

    def __init__(self) -> None:
        self._free: dict[Key, list[torch.Tensor]] = {}
        self.num_bytes = 0

    def take(
        self, num_elements: int, dtype: torch.dtype, device: torch.device, *, pinned: bool = False
    ) -> torch.Tensor:
        """Return a buffer of so many elements, with anything in it."""
        free = self._free.setdefault((dtype, device, pinned), [])
        buffer = free.pop() if free else None
        if buffer is not None and buffer.numel() < num_elements:
            self.num_bytes -= buffer.nbytes
            buffer = None
        if buffer is None:
            buffer = torch.empty(num_elements, dtype=dtype, device=device, pin_memory=pinned)
            self.num_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: torch.Tensor, *, pinned: bool = False) -> None:
        """Take back what ``take`` returned, whole."""
        self._free[buffer.dtype, buffer.device, pinned].append(buffer)
