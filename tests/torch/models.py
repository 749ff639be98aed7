"""Small models of many kinds, for exactness, and the mean loss of a batch on each."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Mlp(nn.Module):
    """Features to class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    """Features as a 6-pixel picture; group normalisation, so that samples do not mix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(8 * 6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.gelu(self.norm(self.conv(x[:, None]))).flatten(1))


class Gpt(nn.Module):
    """Six tokens each; input and output embedding share one matrix."""

    def __init__(self, width: int = 16, vocabulary: int = 11) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(6, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 3).long().clamp(max=10)
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=x.dtype)
        hidden = self.blocks(self.tokens(tokens) + self.positions, mask=mask, is_causal=True)
        return (self.norm(hidden) @ self.tokens.weight.T).mean(1)[:, :5]


class WithDict(nn.Module):
    """A loss and scores in a dict, as many training scripts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        scores = self.inner(x)
        return {"scores": scores, "penalty": (scores**2).mean(), "note": "kept"}


@dataclass
class ModelOutput(OrderedDict):
    """A dict with attributes, as Hugging Face's class of this name behaves."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class HfStyle(nn.Module):
    """Returns a ``ModelOutput``; what was trained on is read by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> ModelOutput:
        logits = self.inner(x)
        return ModelOutput(loss=functional.cross_entropy(logits, labels), logits=logits)


class WithBuffers(nn.Module):
    """A buffer, which DDP broadcasts at the start of every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.scale)


class WithUnused(nn.Module):
    """A layer that no loss ever sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def mean_loss(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, decay: float = 1e-3
) -> torch.Tensor:
    """Return the mean loss over the batch, however the model hands its scores out."""
    inner = getattr(model, "module", model)
    if isinstance(inner, HfStyle):
        output = model(x, labels=y)
        return output.loss + 0.1 * (output.logits**2).mean()
    output = model(x)
    if isinstance(output, dict):
        assert output["note"] == "kept"
        return functional.cross_entropy(output["scores"], y) + output["penalty"]
    used = (p for name, p in inner.named_parameters() if "unused" not in name)
    penalty = sum((parameter**2).sum() for parameter in used)
    return functional.cross_entropy(output, y) + decay * penalty
