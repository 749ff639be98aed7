"""Tiny models in double precision, with the same weights in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NUM_FEATURES, NUM_OUTPUTS = 4, 2


def _layers(inputs: int, outputs: int, *, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def layers(inputs: int, outputs: int, *, seed: int = 0) -> Callable[[], nn.Module]:
    """Return what makes a small network."""
    return partial(_layers, inputs, outputs, seed=seed)


net = layers(NUM_FEATURES, NUM_OUTPUTS)
square = layers(NUM_FEATURES, NUM_FEATURES)  # takes its own outputs
generator = layers(NUM_FEATURES, NUM_FEATURES, seed=1)
critic = layers(NUM_FEATURES, 1, seed=2)


class TwoHeads(nn.Module):
    """A body with two heads, whose outputs come in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _layers(NUM_FEATURES, 6, seed=3)
        self.first, self.second = nn.Linear(6, NUM_OUTPUTS).double(), nn.Linear(6, 1).double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return both outputs."""
        features = torch.tanh(self.body(x))
        return {"first": self.first(features), "second": self.second(features)}


@dataclass
class Output:
    """What a model of transformers' kind returns."""

    loss: torch.Tensor
    logits: torch.Tensor


class WithLoss(nn.Module):
    """Computes its own loss if it is given labels, all by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, *, inputs: torch.Tensor, labels: torch.Tensor) -> Output:
        """Return loss and logits."""
        logits = self.layers(inputs)
        return Output(nn.functional.mse_loss(logits, labels), logits)


class Checkpointed(nn.Module):
    """Its first half is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _layers(NUM_FEATURES, 8, seed=4), nn.Linear(8, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        return self.last(torch.tanh(checkpoint(self.first, x, use_reentrant=False)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """A recurrent network over sequences, time first, that carries its state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.cell, self.head = nn.RNN(3, 5).double(), nn.Linear(5, NUM_OUTPUTS).double()

    def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs of the last time, and the state."""
        features, state = self.cell(x, state)
        return self.head(features[-1]), state


def compiled() -> nn.Module:
    """Return a network that torch.compile traces."""
    return torch.compile(net(), backend="aot_eager")  # type: ignore[return-value]
