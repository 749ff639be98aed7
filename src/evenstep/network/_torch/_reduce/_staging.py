"""Where a chunk lies while it is pushed and pulled: in its bucket, or in a copy for the wire."""

from __future__ import annotations

from typing import final

import torch

from ._buffers import Buffers


@final
class Staging:
    """Gives each chunk memory that the transport can send and receive in, in the wire's numbers.

    Gradients that can go as they are stay where they are: what is pulled overwrites what has been
    pushed, which all servers have by then. Others go through a copy: in other numbers, or, from a
    device, in pinned memory. Copies run on a stream of their own; this
    thread waits for that copy's event alone, and no device is ever synchronised.

    Args:
        buffers: for the copies.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def open(self, gradients: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
        """Return memory with ``gradients`` in it, in numbers of ``wire``, to give to ``close``.

        As large as they are, or larger.
        """
        leaves = gradients.is_cuda
        if gradients.dtype == wire and not leaves:
            return gradients
        device = torch.device("cpu") if leaves else gradients.device
        field = self._buffers.take(gradients.numel(), wire, device, pinned=leaves)
        field[: gradients.numel()].copy_(gradients, non_blocking=leaves)
        if leaves:
            _wait_for_copy(gradients.device)
        return field

    def close(self, field: torch.Tensor, gradients: torch.Tensor) -> None:
        """Have what was pulled into ``field`` take the place of ``gradients``."""
        if field.data_ptr() == gradients.data_ptr():
            return
        leaves = gradients.is_cuda
        gradients.copy_(field[: gradients.numel()], non_blocking=leaves)
        if leaves:
            _wait_for_copy(gradients.device)  # the next chunk's copy may take this memory
        self._buffers.give(field, pinned=leaves)


def _wait_for_copy(device: torch.device) -> None:
    """Wait on this thread for what its stream was given, and for nothing else of the device."""
    # Sleeps instead of spinning.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    event.synchronize()
