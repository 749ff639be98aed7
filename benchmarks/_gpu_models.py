"""A ResNet and a GPT, small and large, with batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks._gpu_gpt import GPT, LARGE, SMALL, Size, next_byte_loss

TINY = Size(width=32, num_layers=1, num_heads=2, context=32, batch_size=8)
"""For runs that only show that the code works."""


class ResNet(nn.Module):
    """A ResNet of basic blocks in four stages, each of half the pixels and twice the channels.

    With two blocks a stage and 64 channels it is a ResNet-18 whose first layer keeps the pixels.

    Args:
        width: channels of the first stage.
        num_blocks: in each stage.

    References:
        K. He et al., *Deep Residual Learning for Image Recognition*, CVPR 2016.
    """

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_normed(3, width, stride=1), nn.ReLU())
        blocks, before = [], width
        for stage in range(4):
            after = width << stage
            for number in range(num_blocks):
                stride = 2 if stage and not number else 1
                blocks.append(Residual(before, after, stride))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Two convolutions, added to what came in."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_normed(before, after, stride=stride), nn.ReLU(), *_normed(after, after, stride=1)
        )
        same = before == after and stride == 1
        self.way = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + self.way(x))


def _normed(before: int, after: int, *, stride: int) -> tuple[nn.Module, nn.Module]:
    conv = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return conv, nn.BatchNorm2d(after)


@dataclass(frozen=True)
class Workload:
    """A model with its batches.

    Attributes:
        make: returns the model, on the CPU.
        batch: returns random samples of a number, on the CPU, for ``loss``.
        loss: of the model on a batch.
        told: the model's size, in words.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    told: str


def resnet(*, small: bool) -> Workload:
    """Return a ResNet-18 on 96 x 96 pixels, or a narrow one on 16 x 16."""
    width, num_blocks, pixels = (4, 1, 16) if small else (64, 2, 96)
    return Workload(
        partial(ResNet, width, num_blocks),
        partial(_pictures, pixels),
        _class_loss,
        f"ResNet, {num_blocks} blocks in each of 4 stages, {width} channels, {pixels} pixels",
    )


def gpt(*, small: bool, length: int | None = None) -> Workload:
    """Return a large GPT, or a tiny one, on sequences of ``length`` bytes."""
    size = TINY if small else LARGE
    return gpt_of(size, length)


def gpt_of(size: Size, length: int | None = None) -> Workload:
    """Return a GPT of this size, on sequences of ``length`` bytes; None is the size's context."""
    length = length or size.context
    longest = Size(size.width, size.num_layers, size.num_heads, length, size.batch_size)
    return Workload(
        partial(GPT, longest),
        partial(_bytes, length),
        _byte_loss,
        f"GPT, {size.num_layers} layers of width {size.width}, {length} bytes of text",
    )


def beside_a_cpu(*, small: bool) -> Size:
    """Return the size of a GPT that a CPU can take part in."""
    return TINY if small else SMALL


def _pictures(pixels: int, num: int) -> tuple[Tensor, ...]:
    return torch.randn(num, 3, pixels, pixels), torch.randint(10, (num,))


def _class_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def _bytes(length: int, num: int) -> tuple[Tensor, ...]:
    return (torch.randint(256, (num, length + 1)),)


def _byte_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return next_byte_loss(model(batch[0][:, :-1]), batch[0])
