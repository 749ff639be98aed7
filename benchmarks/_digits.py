"""scikit-learn's handwritten digits, and a small GroupNorm CNN for them. It knows nothing of us."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def shuffled_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images, ``(num_samples, 1, 8, 8)`` from 0 to 1, and labels, always the same."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], torch.tensor(labels)[order]


def cnn() -> nn.Sequential:
    """Return the CNN of 10,026 parameters, as torch draws them."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )
