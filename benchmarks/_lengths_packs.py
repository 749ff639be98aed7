"""Packing instead: samples put together beforehand, to as many tokens as the longest may have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks._lengths_training import LONGEST, Sample, Text, packed


class Packs(Dataset[list[Sample]]):
    """Packs of whole samples, filled best-fit, the longest sample first.

    Nothing is computed twice, and no sample sees another: attention is of varying length.
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
        self.lengths = np.array([text.lengths[some].sum() for some in self.members])

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
