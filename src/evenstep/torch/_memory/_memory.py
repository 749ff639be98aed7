"""How much memory a step took, read from the device."""

from __future__ import annotations

from typing import Protocol

import torch


class MemoryReader(Protocol):
    """Reads one worker's memory. Anything with these three methods will do."""

    def capacity_bytes(self) -> int:
        """Return what the device offers to this process."""

    def peak_bytes(self) -> int:
        """Return the most that was in use since the last ``reset``."""

    def reset(self) -> None:
        """Start a new peak."""


class CudaMemory:
    """What PyTorch's caching allocator held at most, against what the card could give it.

    The allocator's *allocated* bytes are counted, not those it reserved: a cache grows to whatever
    there is. What other processes hold is not offered. Nothing here waits for the device.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, _ = torch.cuda.mem_get_info(device)
        self._capacity = int(free + torch.cuda.memory_reserved(device))

    def capacity_bytes(self) -> int:
        """Return what was free at the start, and what this process held of it already."""
        return self._capacity

    def peak_bytes(self) -> int:
        """Return the most that tensors took up since the last ``reset``."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def reset(self) -> None:
        """Start a new peak."""
        torch.cuda.reset_peak_memory_stats(self._device)


class NoMemory:
    """For devices whose memory nobody reads: 0 stands for unknown, and nothing is capped."""

    def capacity_bytes(self) -> int:
        """Return 0: unknown."""
        return 0

    def peak_bytes(self) -> int:
        """Return 0: unknown."""
        return 0

    def reset(self) -> None:
        """Do nothing."""
