"""What is trained: scikit-learn's handwritten digits, by a small GroupNorm CNN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.utils.data import Sampler

from benchmarks._digits import cnn, shuffled_digits

NUM_TEST = 500


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Images and their labels.

    Attributes:
        x: pixels from 0 to 1, ``(num_samples, 1, 8, 8)``.
        y: digits, ``(num_samples,)``.
    """

    x: torch.Tensor
    y: torch.Tensor


@cache
def digits() -> tuple[Samples, Samples]:
    """Return 1,297 samples for training and 500 for testing, the same in every process."""
    x, y = shuffled_digits()
    return Samples(x[NUM_TEST:], y[NUM_TEST:]), Samples(x[:NUM_TEST], y[:NUM_TEST])


def network(seed: int) -> nn.Sequential:
    """Return the CNN of 10,026 parameters, drawn by ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cnn()


def accuracy(model: nn.Module, parameters: torch.Tensor) -> float:
    """Return the share of the test images that ``model`` recognizes with flat ``parameters``."""
    nn.utils.vector_to_parameters(parameters, model.parameters())
    test = digits()[1]
    with torch.no_grad():
        right = model(test.x).argmax(dim=1) == test.y
    return float(right.float().mean())


class Order(Sampler[int]):
    """One order of samples for all contestants: epoch after epoch, each drawn anew by ``seed``.

    Args:
        seed: of the draws.
        length: how many samples.
    """

    def __init__(self, seed: int, length: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_samples = len(digits()[0].y)
        num_epochs = -(-length // num_samples)
        epochs = [torch.randperm(num_samples, generator=generator) for _ in range(num_epochs)]
        self.indices: Sequence[int] = torch.cat(epochs)[:length].tolist()

    def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
