"""A few values of a tensor, by which a copy of it is recognised on another device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._batch_memory import has_memory

_NUM_VALUES = 32


@dataclass(frozen=True, slots=True)
class Peek:
    """Values of a tensor's first row, evenly spaced; of rows of one value, the first ones.

    Attributes:
        row: the shape of a row.
        values: some of its values.
    """

    row: torch.Size
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Peek | None:
        """Return what there is to see of ``tensor``; None of scalars and of what has no strides."""
        if not has_memory(tensor) or not tensor.ndim:
            return None
        with torch.no_grad():
            return cls(tensor.shape[1:], _some(tensor))

    def shows(self, tensor: torch.Tensor) -> bool:
        """Tell whether ``tensor`` may begin with a copy: moved, or cast to another type.

        A tensor on a device is waited for. Only what leaves its batch open gets here.
        """
        if tensor.ndim != len(self.row) + 1 or tensor.shape[1:] != self.row:
            return False
        with torch.no_grad():
            theirs = _some(tensor)
            length = min(len(theirs), len(self.values))
            mine = self.values[:length].to(theirs.device, theirs.dtype)
            return torch.allclose(mine, theirs[:length], rtol=0.0, atol=0.0, equal_nan=True)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 1:
        return tensor[:_NUM_VALUES].clone()
    row = tensor[0]
    size = row.numel()
    count = min(size, _NUM_VALUES)
    return row.take(torch.arange(count, device=row.device) * size // count)
