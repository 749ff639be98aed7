"""Numbered samples in the forms in which data sets give them.

Whatever a loop would draw at random is part of the sample, so that it does not depend on who
computes which sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, TensorDataset

NUM_TIMES = 6


def _numbers(num_samples: int, *shape: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(num_samples, *shape, generator=draw, dtype=torch.float64)
    # Late samples count more, so that a wrong weight shows.
    return numbers * torch.linspace(0.5, 2, num_samples).double().view(-1, *(1 for _ in shape))


def pairs(num_samples: int) -> Dataset[Any]:
    """Return features and targets."""
    return TensorDataset(_numbers(num_samples, 4, seed=1), _numbers(num_samples, 2, seed=2))


def with_noise(num_samples: int) -> Dataset[Any]:
    """Return features, noise of their shape, and a number in [0, 1)."""
    share = torch.rand(num_samples, 1, generator=torch.Generator().manual_seed(4)).double()
    return TensorDataset(_numbers(num_samples, 4, seed=1), _numbers(num_samples, 4, seed=3), share)


def with_partners(num_samples: int) -> Dataset[Any]:
    """Return two samples with their targets and a share: what mixup mixes."""
    one, other = pairs(num_samples).tensors, (_numbers(num_samples, 4, seed=5),)  # type: ignore[attr-defined]
    share = torch.rand(num_samples, 1, generator=torch.Generator().manual_seed(6)).double()
    return TensorDataset(*one, *other, _numbers(num_samples, 2, seed=7), share)


def with_groups(num_samples: int) -> Dataset[Any]:
    """Return features, targets, and which of three minibatches a sample belongs to."""
    return TensorDataset(*pairs(num_samples).tensors, torch.arange(num_samples) * 7 % 3)  # type: ignore[attr-defined]


def sequences(num_samples: int) -> Dataset[Any]:
    """Return sequences of six times with three features, and targets."""
    x = _numbers(num_samples, NUM_TIMES, 3, seed=8)
    return TensorDataset(x, _numbers(num_samples, 2, seed=2))


def words(num_samples: int) -> Dataset[Any]:
    """Return six vectors of four features, and a target for each."""
    x = _numbers(num_samples, NUM_TIMES, 4, seed=9)
    return TensorDataset(x, _numbers(num_samples, NUM_TIMES, 2, seed=10))


class Dicts(Dataset[Any]):
    """Samples as dicts, as tokenizers give them."""

    def __init__(self, num_samples: int) -> None:
        self._pairs = pairs(num_samples)

    def __len__(self) -> int:
        return len(self._pairs)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        x, y = self._pairs[index]
        return {"inputs": x, "labels": y}


class Nested(Dicts):
    """Samples as a tuple of dicts, as detectors have images and targets."""

    def __getitem__(self, index: int) -> Any:
        x, y = self._pairs[index]
        return {"image": x}, {"boxes": y, "number": index}


class Crops(Dicts):
    """Samples as lists of views, as multi-crop augmentation gives them."""

    def __getitem__(self, index: int) -> Any:
        x, y = self._pairs[index]
        return [x, x.flip(0), 0.5 * x], y


class Named(NamedTuple):
    """A batch whose fields have names."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Moved:
    """A batch of a class of its own, which is moved by ``to``, as in torch_geometric."""

    x: torch.Tensor
    y: torch.Tensor

    def to(self, *where: Any) -> Moved:
        """Return a copy there."""
        return Moved(self.x.to(*where, copy=True), self.y.to(*where, copy=True))


class Plain:
    """A batch of a class that is no dataclass either."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.features, self.targets = x, y


def _stacked(samples: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def as_named(samples: Sequence[Any]) -> Named:
    """Return a named tuple."""
    return Named(*_stacked(samples))


def as_moved(samples: Sequence[Any]) -> Moved:
    """Return a dataclass with a ``to``."""
    return Moved(*_stacked(samples))


def as_plain(samples: Sequence[Any]) -> Plain:
    """Return an object with attributes."""
    return Plain(*_stacked(samples))


def time_first(samples: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences of shape (times, samples, features), and targets."""
    return torch.stack([x for x, _ in samples], 1), torch.stack([y for _, y in samples])
