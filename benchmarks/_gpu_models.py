"""A GPT over bytes of three sizes, with batches for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class Size:
    """How large a GPT, on how much text.

    Attributes:
        width: numbers per token, a multiple of ``num_heads``.
        num_layers: transformer blocks.
        num_heads: attention heads per block.
        context: bytes of text that one sample holds.
    """

    width: int
    num_layers: int
    num_heads: int
    context: int


TINY = Size(width=32, num_layers=1, num_heads=2, context=32)
"""For runs that only show that the code works."""

SMALL = Size(width=64, num_layers=2, num_heads=4, context=64)
"""Costs about 1 ms per sample on one core, so that a CPU can take part."""

LARGE = Size(width=512, num_layers=8, num_heads=8, context=256)
"""Large enough to keep a recent card busy for tens of milliseconds a step."""


class GPT(nn.Module):
    """A causal transformer from bytes ``(batch, time)`` to logits ``(batch, time, 256)``.

    The embedding doubles as the output layer (Press & Wolf 2017), so one parameter gets gradients
    from both ends of the network: a case that balanced training has to get right.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size.width)
        self.place = nn.Parameter(torch.zeros(size.context, size.width))
        self.blocks = nn.Sequential(
            *(Block(size.width, size.num_heads) for _ in range(size.num_layers))
        )
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(tokens) + self.place[: tokens.shape[1]])
        return functional.linear(self.norm(hidden), self.embed.weight)


class Block(nn.Module):
    """Attention, then a feed-forward part, each added to what came in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attend = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm_think = nn.LayerNorm(width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norm_attend(x)).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        thought: Tensor = self.think(self.norm_think(x))
        return x + thought


@dataclass(frozen=True)
class Workload:
    """A GPT of a size, with its batches."""

    size: Size

    @property
    def told(self) -> str:
        """The size, in words."""
        size = self.size
        return f"GPT, {size.num_layers} layers of width {size.width}, {size.context} bytes of text"

    def make(self) -> GPT:
        """Return the model, on the CPU."""
        return GPT(self.size)

    def batch(self, num: int) -> tuple[Tensor, ...]:
        """Return random samples of this number, on the CPU."""
        return (torch.randint(VOCABULARY, (num, self.size.context + 1)),)

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the mean cross-entropy of each byte given those before it, in nats."""
        logits = model(batch[0][:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


def gpt(*, small: bool) -> Workload:
    """Return a GPT for a card, or a tiny one."""
    return Workload(TINY if small else LARGE)


def beside_a_cpu(*, small: bool) -> Workload:
    """Return a GPT that a CPU can take part in."""
    return Workload(TINY if small else SMALL)
