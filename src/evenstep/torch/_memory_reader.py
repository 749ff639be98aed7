"""How much memory a step took, read from the device."""

from __future__ import annotations

from typing import Any, Protocol

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
    """Reads the peak of PyTorch's caching allocator, and the memory that the GPU offers to it.

    The peak counts *allocated* bytes, not reserved ones, because a cache grows to any size. Memory
    of other processes is not offered. No method waits for the device.

    A step's own peak requires that torch's peak statistics are reset at each step, and a process
    has one set of them. So ``torch.cuda.max_memory_allocated()`` is the peak since the current step
    began. ``highest_bytes`` is the peak of the run.

    Usage:
        memory = CudaMemory("cuda:0")
        balancer = Balancer(runtime=Runtime(memory=memory))
        ...
        print(memory.highest_bytes())

    Args:
        device: the CUDA device.
        cuda: where torch's statistics are read: for tests, anything with its four functions.
    """

    def __init__(self, device: torch.device | str, *, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._highest = 0
        free, _ = cuda.mem_get_info(device)
        self._capacity = int(free + cuda.memory_reserved(device))

    def capacity_bytes(self) -> int:
        """Return what was free at the start, and what this process held of it already."""
        return self._capacity

    def peak_bytes(self) -> int:
        """Return the most that tensors took up since the last ``reset``."""
        return int(self._cuda.max_memory_allocated(self._device))

    def reset(self) -> None:
        """Start a new peak."""
        self._highest = self.highest_bytes()
        self._cuda.reset_peak_memory_stats(self._device)

    def highest_bytes(self) -> int:
        """Return the most that tensors took up since this object was made, over all resets."""
        return max(self._highest, self.peak_bytes())
