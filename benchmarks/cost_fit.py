"""What a fitted cost model says of mixes that it has not seen, on real compute.

A transformer of two layers trains on functions of the standard library, packed (attention by
sequence) and padded (one batch). Four ranks take turns in one process; a rank of speed 1/2 does
its work twice. Time is the process's CPU time, which other load does not touch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from time import process_time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks._common import Row, main, progress
from benchmarks._real_text import function_lengths
from evenstep.timemodels import CostEstimator

WIDTH, BATCH, LONGEST = 64, 32, 768
SPEEDS = {"equal": (4, 4, 4, 4), "1:1:2:4": (4, 4, 2, 1)}  # how often each rank does its work


class Layer(nn.Module):
    """Attention inside each sequence, then a perceptron; tokens of all sequences in one row."""

    def __init__(self) -> None:  # noqa: D107  # the class says it
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Return the tokens after the layer, ``(num_tokens, WIDTH)``."""
        seen = [
            scaled_dot_product_attention(*one.view(1, len(one), 3, WIDTH).unbind(2), is_causal=True)
            for one in self.qkv(tokens).split(lengths)
        ]
        tokens = tokens + self.out(torch.cat([one[0] for one in seen]))
        return tokens + self.down(self.up(tokens).relu())


def cpu_s(layers: nn.ModuleList, lengths: np.ndarray, times: int, *, padded: bool) -> float:
    """Return the CPU seconds of a forward and backward on sequences, done so many times."""
    sizes = [int(lengths.max())] * len(lengths) if padded else lengths.tolist()
    begin = process_time()
    for _ in range(times):
        tokens = torch.zeros(sum(sizes), WIDTH)
        for layer in layers:
            tokens = layer(tokens, sizes)
        tokens.square().mean().backward()
    return process_time() - begin


def work_of(lengths: np.ndarray, *, padded: bool) -> np.ndarray:
    """Return the features of a rank's forward: sums of 1, L and L**2, or n times its longest."""
    features = np.stack([np.ones_like(lengths), lengths, lengths**2], 1)
    return len(lengths) * features.max(axis=0) if padded else features.sum(axis=0)


def measure(speeds: str, *, padded: bool, num_unseen: int) -> dict[str, float]:
    """Train an estimator for 20 steps, and compare it with mixes dealt in another way."""
    torch.manual_seed(0)
    layers = nn.ModuleList([Layer(), Layer()])
    text, rng = np.minimum(function_lengths(), LONGEST), np.random.default_rng(0)
    times = SPEEDS[speeds]
    estimator = CostEstimator.fresh(num_features=3, kinds=[0] * 4)
    for _ in range(3):  # warm up
        cpu_s(layers, text[:8], 1, padded=padded)
    for _ in range(20):
        parts = np.split(rng.choice(text, BATCH), 4)
        took = [cpu_s(layers, *one, padded=padded) for one in zip(parts, times, strict=True)]
        work = [work_of(part, padded=padded) for part in parts]
        estimator = estimator.observe(work, [len(part) for part in parts], took)
    assert estimator.model is not None
    errors = []
    for _ in range(num_unseen):
        parts = np.split(np.sort(rng.choice(text, BATCH)), sorted(rng.choice(31, 3, False) + 1))
        took = [cpu_s(layers, *one, padded=padded) for one in zip(parts, times, strict=True)]
        predicted = estimator.model.seconds([work_of(part, padded=padded) for part in parts])
        errors.extend(abs(predicted / np.array(took) - 1))
    again = [cpu_s(layers, parts[0], times[0], padded=padded) for _ in range(15)]
    noise = float(np.median(abs(np.array(again) / np.median(again) - 1)))
    return {
        "median_error": float(np.median(errors)),
        "repeat_noise": noise,
        "predicted_by_features": estimator.error,
        "predicted_by_counts": estimator.error_by_count,
    }


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Packed and padded, at equal and at unlike speeds."""
    torch.set_num_threads(1)
    for padded in (False, True):
        for speeds in SPEEDS:
            name = f"{'padded' if padded else 'packed'}, speeds {speeds}"
            progress(name)
            found = measure(speeds, padded=padded, num_unseen=3 if options.quick else 10)
            most = max(0.05, 1.5 * found["repeat_noise"])
            yield Row(
                name,
                "median error on unseen mixes <= max(5 %, 1.5 x repeat noise)",
                found,
                found["median_error"] <= most,
            )


if __name__ == "__main__":
    main(__doc__.splitlines()[0], rows)
