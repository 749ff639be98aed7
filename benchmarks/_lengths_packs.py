"""Packing instead: samples put together beforehand, to as many tokens as the longest may have.

A step has `NUM_PACKS` packs, two for each rank, as plain DDP deals out equally many. Without packs
it has as many samples as these packs have on average, so as many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks._lengths_training import LONGEST, Sample, Text, packed

NUM_PACKS, RANKS = 8, 4
FIGURES = ("tokens", "step_s", "slowest_s")
PACKING = ("packs, plain", "ours, unpacked", "packs, ours")


class Packs(Dataset[list[Sample]]):
    """Packs of whole samples, filled best-fit, the longest sample first.

    Nothing is computed twice, and no sample sees another: attention is of varying length.

    Attributes:
        members: indices of the samples of each pack.
        lengths: tokens of each pack, ``(num_packs,)``.
        features: those, and the sum of the squared lengths of its samples, ``(num_packs, 2)``.
        cost: what its samples cost together, ``(num_packs,)``.
    """

    def __init__(self, text: Text) -> None:  # the class says it
        self.text = text
        self.members: list[list[int]] = []
        with_room: list[list[int]] = [[] for _ in range(LONGEST + 1)]  # packs, by tokens left
        for index in np.argsort(-text.lengths, kind="stable").tolist():
            size = int(text.lengths[index])
            left = next((room for room in range(size, LONGEST + 1) if with_room[room]), None)
            if left is None:
                self.members.append([])
                with_room[LONGEST].append(len(self.members) - 1)
                left = LONGEST
            place = with_room[left].pop()
            self.members[place].append(index)
            with_room[left - size].append(place)
        each = np.stack([text.lengths, text.lengths**2], axis=1)
        self.features = np.array([each[some].sum(axis=0) for some in self.members])
        self.lengths = self.features[:, 0]
        self.cost = np.array([text.cost[some].sum() for some in self.members])

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: int) -> list[Sample]:
        return [self.text[member] for member in self.members[index]]


@cache
def packs(text: Text) -> Packs:
    """Return the packs of a data set, made once in a process."""
    return Packs(text)


def unpacked(batch: Sequence[list[Sample]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the samples of some packs in one row, as ``packed`` does."""
    return packed(list(chain.from_iterable(batch)))


def pack_orders(
    text: Text, rng: np.random.Generator, *, warm_up: int, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what steps train on, of packs and of samples.

    After ``warm_up`` steps both train on the same samples, but for a few: a step has equally many
    for each rank, and as many as every other step.

    Args:
        text: the samples.
        rng: shuffles packs and samples.
        warm_up: first steps.
        steps: further steps.

    Returns:
        Packs, ``(warm_up + steps, NUM_PACKS)``, and samples, ``(warm_up + steps, batch_size)``.
    """
    whole, num_steps = packs(text), warm_up + steps
    places = rng.permutation(len(whole))[: num_steps * NUM_PACKS].reshape(num_steps, NUM_PACKS)
    counted = [index for place in places[warm_up:].ravel() for index in whole.members[place]]
    others = np.setdiff1d(np.arange(len(text)), counted)
    batch_size = RANKS * round(len(counted) / steps / RANKS)
    samples = np.concatenate([rng.permutation(counted), rng.permutation(others)])
    in_steps = samples[: num_steps * batch_size].reshape(num_steps, batch_size)
    return places, np.roll(in_steps, warm_up, axis=0)


def packing(found: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return real tokens per second of each method over those of plain DDP on packs.

    Args:
        found: seconds, tokens and emulated seconds of the slowest device, by method, block, step.
        steps: that count in each block, the last ones.
    """
    late = {
        name: [np.array(found[name][what])[:, -steps:].ravel() for what in FIGURES]
        for name in PACKING
    }
    plain, rng = late[PACKING[0]], np.random.default_rng(0)
    limits = {}
    for name in PACKING[1:]:
        draws = [_rate(*_drawn(late[name], rng)) / _rate(*_drawn(plain, rng)) for _ in range(2000)]
        limits[name] = np.quantile(draws, (0.025, 0.975)).tolist()
    return {
        "tokens_per_s_over_plain_packs": {
            name: _rate(tokens, took_s) / _rate(*plain[:2])
            for name, (tokens, took_s, _) in late.items()
        },
        "limits_95": limits,
        "by_the_slowest_device_alone": {
            name: _rate(tokens, slowest_s) / _rate(plain[0], plain[2])
            for name, (tokens, _, slowest_s) in late.items()
        },
        "tokens_per_s": {name: _rate(*one[:2]) for name, one in late.items()},
        "tokens_per_step": {name: float(one[0].mean()) for name, one in late.items()},
        "host_s": {name: float(np.median(one[1] - one[2])) for name, one in late.items()},
    }


def _drawn(one: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Return as many steps, drawn with repetition: their tokens and seconds."""
    places = rng.integers(len(one[0]), size=len(one[0]))
    return [values[places] for values in one[:2]]


def _rate(tokens: np.ndarray, seconds: np.ndarray) -> float:
    return float(tokens.sum() / seconds.sum())
