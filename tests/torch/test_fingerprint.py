"""Samples compared between ranks: equal up to rounding, whatever they are made of."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from evenstep.torch._data.compare._content import (
    Fingerprint,
    fetch_samples,
    positions_in,
    same_values,
    unlike,
)

LONG = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("a", "b"),
        (None, 0),
        (True, False),
        ([1, 2], [2, 1]),
        ([0.5, 1.5], [1.5, 0.5]),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([1.0, -2.0]), torch.tensor([1.0, 2.0])),
        (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")])),
        (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
        (torch.ones(2, dtype=torch.bfloat16), 2 * torch.ones(2, dtype=torch.bfloat16)),
        (np.array(["a", "b"]), np.array(["b", "a"])),
        (np.array([True, False]), np.array([False, True])),
        (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3)[::-1]),
        (np.float16(1.0), np.float16(1.5)),
        (np.datetime64("2026-01-01"), np.datetime64("2026-01-02")),
        (LONG, LONG.roll(1)),
        (LONG.numpy(), LONG.roll(1).numpy()),
    ],
)
def test_other_values_are_noticed(one, other):
    """Of the same types, and in the same order: nothing is a difference from itself."""
    mine, theirs = Fingerprint.of(one), Fingerprint.of(other)

    assert same_values(mine, Fingerprint.of(one))
    assert not same_values(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rounding_is_no_difference(dtype):
    """Unlike hardware and libraries compute other last bits."""
    exact = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one, other = exact.to(dtype), (exact * (1 + 2 * torch.finfo(dtype).eps)).to(dtype)

    assert same_values(Fingerprint.of(one), Fingerprint.of(other))
    assert not same_values(Fingerprint.of(one), Fingerprint.of(one.roll(1)))


def test_types_shapes_and_values_are_told_apart():
    """Lengths of lists are shapes, keys of mappings are types; numbers of dimensions too."""
    base = Fingerprint.of({"x": [torch.zeros(2, 3)], "y": 1})

    assert Fingerprint.of({"y": 1, "x": [torch.zeros(2, 3)]}) == base
    assert Fingerprint.of({"x": [torch.zeros(2, 4)], "y": 1}).types == base.types
    assert Fingerprint.of({"x": [torch.zeros(2, 4)], "y": 1}).shapes != base.shapes
    assert Fingerprint.of({"x": [torch.zeros(2, 3)] * 2, "y": 1}).types == base.types
    assert Fingerprint.of({"x": [torch.zeros(6)], "y": 1}).types != base.types
    assert Fingerprint.of({"x": [torch.zeros(2, 3)], "z": 1}).types != base.types
    assert Fingerprint.of({"x": [torch.zeros(2, 3).double()], "y": 1}).types != base.types


def test_an_endless_nesting_of_samples_comes_to_an_end():
    """A sample of a hundred thousand parts is looked at in part."""
    assert Fingerprint.of([{"a": [index]} for index in range(100_000)]).types.startswith("list[")


def sample(*values):
    return [Fingerprint.of(value) for value in values]


def test_what_is_random_is_compared_by_what_stays_the_same():
    """Values where all fetches agree, else shapes, else types."""
    zeros, ones, longer = torch.zeros(2), torch.ones(2), torch.zeros(3)

    assert unlike([sample(zeros, zeros), sample(zeros, zeros)]) is None
    assert unlike([sample(zeros, zeros), sample(ones, ones)]) == "values"
    assert unlike([sample(zeros, ones), sample(ones, ones)]) is None
    assert unlike([sample(zeros, ones), sample(longer, longer + 1)]) == "shapes"
    assert unlike([sample(zeros, longer), sample(longer, longer)]) is None
    assert unlike([sample(zeros, longer), sample(1, 1)]) == "types"
    assert unlike([sample(zeros, None), sample(1, 1)]) is None


@pytest.mark.parametrize("num_samples", [0, 1, 2, 7, 1000, 10**12])
def test_a_few_positions_are_looked_at(num_samples):
    """The first, the middle, the last, and at most two more, each once."""
    found = positions_in(num_samples)

    assert found == sorted(set(found))
    assert all(0 <= position < num_samples for position in found)
    assert len(found) <= 5
    assert {0, num_samples // 2, num_samples - 1} <= set(found) or not num_samples


class Drawn(Dataset):
    """Samples by chance; it notes where it is asked."""

    def __init__(self):
        self.num_fetched = 0

    def __len__(self):
        return 100

    def __getitem__(self, index):
        self.num_fetched += 1
        return index, torch.rand(2), np.random.rand(), random.random()


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_looking_at_samples_changes_no_random_state(num_workers):
    """Chance that a seed controls is the same in each fetch; with workers, they alone fetch."""
    dataset, positions = Drawn(), [0, 50, 99]
    states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    found = fetch_samples(DataLoader(dataset, num_workers=num_workers), positions, 2)

    assert list(found) == positions
    assert all(same_values(*prints) for prints in found.values())
    assert dataset.num_fetched == (0 if num_workers else 6)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def leave(worker):
    raise OSError("no such host")


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_worker_that_fails_is_told_of_and_stops_nothing():
    """What is wrong, training will meet by itself, or never."""
    with pytest.warns(UserWarning, match="No samples of Drawn were compared across ranks: .*OSErr"):
        found = fetch_samples(DataLoader(Drawn(), num_workers=1, worker_init_fn=leave), [0], 2)
    assert found == {}
