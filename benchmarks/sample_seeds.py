"""What random numbers by sample cost: reading samples, dropout, and a step of a model with both.

One process trains with `Runtime(sample_seed=...)` and without it, a block of steps each in turn.
CPU seconds are compared, which say something on a busy machine too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import islice
from time import process_time
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks._common import Row, main, progress
from benchmarks.equal_workers import bootstrap_median
from evenstep.torch import Balancer, Runtime

WARM_UP = 1  # turns
SMALL = 500  # functions of torch's in a forward
BLOCK = 5  # steps of one kind in a row


@final
class Drawn(Dataset[torch.Tensor]):
    """Samples of one shape; each draws a number, as a flip would."""

    def __init__(self, shape: tuple[int, ...], length: int) -> None:  # noqa: D107
        self._value, self._length = torch.randn(shape), length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return -self._value if float(torch.rand(())) < 0.5 else self._value


@final
class Block(nn.Module):
    """What a transformer has beside attention."""

    def __init__(self, width: int) -> None:  # noqa: D107  # the class says it
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` with a residual."""
        return value + self.layers(value)  # type: ignore[no-any-return]


def in_turns(
    model: Callable[[], nn.Module], shape: tuple[int, ...], batch_size: int, num_turns: int
) -> dict[str, np.ndarray]:
    """Return the CPU seconds of a step, ``(num_turns,)``, with seeds by sample and without."""
    num_steps = (num_turns + WARM_UP) * BLOCK
    kinds = {"without": None, "by sample": 1}
    balancers, models, loops = [], {}, {}
    for name, seed in kinds.items():
        torch.manual_seed(0)
        balancers.append(Balancer(runtime=Runtime(line_every=None, sample_seed=seed)))
        stock = DataLoader(Drawn(shape, num_steps * batch_size), batch_size=batch_size)
        made: Any = balancers[-1].prepare(model(), stock)
        models[name], loops[name] = made[0], iter(made[1])
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(num_turns + WARM_UP):
        for name in kinds:
            began_s = process_time()
            for value in islice(loops[name], BLOCK):
                models[name](value).sum().backward()
            if turn >= WARM_UP:
                found[name].append((process_time() - began_s) / BLOCK)
    loops.clear()
    for balancer in balancers:
        balancer.close()
    return {name: np.array(took_s) for name, took_s in found.items()}


class Dropped(nn.Module):
    """Dropout, and a parameter."""

    def __init__(self, chance: float) -> None:  # noqa: D107
        super().__init__()
        self.factor, self.dropout = nn.Parameter(torch.ones(())), nn.Dropout(chance)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return what is left of the products."""
        return self.dropout(value * self.factor)  # type: ignore[no-any-return]


class Small(nn.Module):
    """Many functions of torch's, each on little."""

    def __init__(self) -> None:  # noqa: D107
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` times the factor, and ``SMALL`` ones."""
        value = value * self.factor
        for _ in range(SMALL):
            value = value + 1
        return value


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure each part of the cost by itself, then a step with all of them."""
    num_turns = 3 if options.quick else options.turns
    progress("samples")
    took_s = in_turns(lambda: nn.Linear(1, 1), (1,), 512, num_turns)
    more_s = (took_s["by sample"] - took_s["without"]) / 512
    yield Row(
        "a sample, read in the training process",
        "reported",
        {"median_more_s": float(np.median(more_s)), "limits_95_s": bootstrap_median(more_s)},
    )
    progress("dropout")
    shape, size = (128, 256), 64
    took_s = in_turns(lambda: Dropped(0.1), shape, size, num_turns)
    plain_s = in_turns(lambda: Dropped(0.0), shape, size, num_turns)["without"]
    elements = size * shape[0] * shape[1]
    yield Row(
        f"dropout of {elements / 1e6:.1f} million elements, over a step without any",
        "reported",
        {
            name: {"median_more_s_per_element": float(np.median(each - plain_s) / elements)}
            for name, each in took_s.items()
        },
    )
    progress("functions")
    took_s = in_turns(Small, (1,), 1, num_turns)
    more_s = (took_s["by sample"] - took_s["without"]) / SMALL
    yield Row(
        "a function of torch's in a forward, of which the one sample is read as well",
        "reported",
        {"median_more_s": float(np.median(more_s)), "limits_95_s": bootstrap_median(more_s)},
    )
    progress("a step")
    blocks = lambda: nn.Sequential(*(Block(256) for _ in range(4)))  # noqa: E731
    took_s = in_turns(blocks, (64, 256), 16, num_turns)
    ratios = took_s["by sample"] / took_s["without"]
    yield Row(
        "a step of four transformer blocks without attention, 16 x 64 tokens of width 256",
        "reported",
        {
            "without_s": float(np.median(took_s["without"])),
            "ratio": float(np.median(ratios)),
            "limits_95": bootstrap_median(ratios),
        },
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how long to measure."""
    parser.add_argument("--turns", type=int, default=20, help="blocks of each kind")


if __name__ == "__main__":
    main(__doc__.splitlines()[0], rows, add_options)
