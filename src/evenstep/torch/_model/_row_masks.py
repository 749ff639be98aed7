"""Masks whose rows follow from the rows' samples alone, on any device, whatever else is there."""

from __future__ import annotations

from typing import final

import numpy as np
import torch

from ..._types import IntArray
from .._data.deal._sample_keys import FACTORS, drawn_rows, mixed

_MOST_AT_ONCE = 1 << 16  # elements that are drawn at a time: they stay in a CPU's cache
_MOST_ON_DEVICE = 1 << 24  # there, 128 MiB
_BLOCK = 32  # draws for which rows are made ready and go to the device together


@final
class RowMasks:
    r"""Draws masks by a counter: an element's bit is a hash of its row and its place in that row.

    The hash is SplitMix64's: of ``row + place``, where the row's number follows from its sample's
    key and the number of the draw, and the place is the sum of its coordinates, each times an odd
    constant of its dimension. So a row that is padded keeps the bits that it has unpadded.

    Args:
        keys: of the samples, one a row.
        first: number of the first draw.
    """

    def __init__(self, keys: IntArray, first: int) -> None:
        self._keys = keys
        self._next = first
        self._rows: list[torch.Tensor] = []  # of the next draws
        self._device: torch.device | None = None

    def draw(self, shape: torch.Size, chance: float, device: torch.device) -> torch.Tensor:
        """Return booleans of ``shape``, True with this chance, whose rows are the samples'.

        Args:
            shape: its first dimension is as long as there are samples.
            chance: from 0 to 1.
            device: where they are made. It is not waited for.
        """
        rows = self._next_rows(device).view(-1, *[1] * (len(shape) - 1))
        threshold = round(chance * 2.0**64) - (1 << 63)
        if threshold >= 1 << 63:
            return torch.ones(shape, dtype=torch.bool, device=device)
        places = _places(shape[1:], device)
        most = _MOST_AT_ONCE if device.type == "cpu" else _MOST_ON_DEVICE
        num_rows = max(most // max(places.numel(), 1), 1)
        blocks = rows.split(num_rows)  # type: ignore[no-untyped-call]
        parts = [_hashed(block + places) < threshold for block in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _next_rows(self, device: torch.device) -> torch.Tensor:
        if not self._rows or device != self._device:
            rows = torch.from_numpy(drawn_rows(self._keys, self._next, _BLOCK))
            if device.type != "cpu":  # from pinned memory, or the device is waited for
                rows = rows.pin_memory().to(device, non_blocking=True)
            self._rows, self._device = list(rows.unbind(0)), device
        self._next += 1
        return self._rows.pop(0)


def _places(shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Return the numbers of the places in a row, ``(1, *shape)``."""
    places = torch.zeros((1,) * (1 + len(shape)), dtype=torch.int64, device=device)
    factors = (mixed(np.arange(len(shape), dtype=np.uint64)) | np.uint64(1)).view(np.int64)
    for at, size in enumerate(shape):
        along = torch.arange(size, device=device) * int(factors[at])
        places = places + along.view(-1, *[1] * (len(shape) - 1 - at))
    return places


def _hashed(numbers: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64 of ``numbers``, which are overwritten, less its last shift."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        shifted = (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # without the sign
        numbers.bitwise_xor_(shifted).mul_(factor - (1 << 64))  # the factor as a signed integer
    return numbers
