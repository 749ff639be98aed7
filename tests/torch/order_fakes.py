"""Samplers for the tests of orders in blocks."""

from __future__ import annotations

import random
from itertools import count

import torch
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class Drawing:
    """A sampler that draws every index from torch's generator when it is asked for it."""

    def __init__(self, length):
        self.length = length
        self.num_drawn = 0

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            self.num_drawn += 1
            yield int(torch.randint(29, ()))


class Sized:
    """A sampler that says how long it is, and may be wrong."""

    def __init__(self, indices, length):
        self.indices, self.length = indices, length

    def __len__(self):
        return self.length

    def __iter__(self):
        yield from self.indices


class Endless:
    """A sampler without a length, which may end all the same."""

    def __init__(self, most=None):
        self.most = most

    def __iter__(self):
        numbers = count() if self.most is None else range(self.most)
        return (number % 29 for number in numbers)


def seeded(seed=3):
    return torch.Generator().manual_seed(seed)


def indices_of(loader):
    return [batch[0].tolist() for batch in loader]


SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(29)),
    "shuffled": lambda: RandomSampler(range(29)),
    "shuffled by a generator": lambda: RandomSampler(range(29), generator=seeded()),
    "more than there are": lambda: RandomSampler(range(9), num_samples=29, generator=seeded()),
    "with replacement": lambda: RandomSampler(range(29), replacement=True, num_samples=77),
    "likewise, by a generator": lambda: RandomSampler(
        range(29), replacement=True, num_samples=77, generator=seeded()
    ),
    "weighted": lambda: WeightedRandomSampler([1.0] * 9 + [3.0] * 20, 31),
    "subset": lambda: SubsetRandomSampler(range(3, 26), generator=seeded()),
    "list": lambda: random.Random(1).sample(range(29), 29),
    "drawn one by one": lambda: Drawing(31),
}
