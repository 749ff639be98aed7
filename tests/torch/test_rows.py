"""Batches cut by their samples, whatever container they come in."""

import os
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from evenstep.torch._memory._layout import Layout, layout_by

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Graphs:
    """A batch of a user's own."""

    nodes: torch.Tensor
    names: list


X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


KINDS = {
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "named tuple": Pair,
    "dicts": lambda x, y: {"x": x, "more": {"y": y}},
    "dataclass": lambda x, y: Graphs(x, list("abcdef")[: len(x)]),
    "as many fields as samples": lambda x, y: [x, y, x.clone(), y.clone(), -x, -y],
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_put_together_are_the_batch(kind):
    """Each sample is in one part, in order, in every field."""
    make = KINDS[kind]
    batch, layout = make(X, Y), Layout(lambda size: make(X[:size], Y[:size]))
    parts = layout.split(batch, 6, (1, 3, 2))

    assert [type(part) for part in parts] == [type(batch)] * 3
    for fields in zip(_leaves(batch), *map(_leaves, parts), strict=True):
        whole, *pieces = fields
        assert [len(piece) for piece in pieces] == [1, 3, 2]
        if isinstance(whole, list):
            assert [entry for piece in pieces for entry in piece] == whole
        else:
            assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("num_samples", [2, 3, 6])
def test_what_is_as_long_as_the_batch_by_chance_stays_whole(num_samples):
    """Class weights, names of classes, a mask over positions, in a batch of as many samples."""

    def make(size):
        names = [f"class {n}" for n in range(num_samples)]
        more = {"names": names, "mask": torch.ones(num_samples, num_samples)}
        return X[:size], torch.ones(num_samples), more

    for part in Layout(make).split(make(num_samples), num_samples, (1, num_samples - 1)):
        x, weights, more = part
        assert len(x) < num_samples
        assert len(weights) == len(more["names"]) == len(more["mask"]) == num_samples


def test_what_nobody_can_tell_of_is_refused():
    """A field that other batches lack, or that has another length than its samples."""
    layout = Layout(lambda size: {"x": X[:size], "nodes": X[:size]})

    with pytest.raises(ValueError, match=r"got `batch\['seldom'\]` with 6 entries. Have"):
        layout.split({"x": X, "nodes": X, "seldom": Y}, 6, (3, 3))
    with pytest.raises(ValueError, match=r"got `batch\['nodes'\]` with 5 entries. Have"):
        layout.split({"x": X, "nodes": X[:5]}, 6, (3, 3))


class Drawn(Dataset):
    """Samples with noise, which say in which process they were made."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return X[index] + torch.rand(2), os.getpid()


def with_weights(samples):
    """Collate, with the process that it was done in and three class weights."""
    pids = {pid for _, pid in samples}
    return torch.stack([x for x, _ in samples]), torch.ones(3), pids, torch.rand(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_loaders_own_collating_tells(num_workers):
    """Of samples that are fetched where the loader fetches them; random states stay."""
    loader = DataLoader(Drawn(), 3, collate_fn=with_weights, num_workers=num_workers)
    before = torch.get_rng_state()

    layout = layout_by(loader, None)()

    assert torch.equal(torch.get_rng_state(), before)
    batch = next(iter(loader))
    assert (batch[2] == {os.getpid()}) == (num_workers == 0)
    assert layout.per_sample(batch, 3) == [batch[0]]


def test_lists_of_samples_are_cut():
    """A `collate_fn` that keeps samples apart gives a list of them."""
    samples = [torch.zeros(n + 10) for n in range(6)]
    layout = Layout(lambda size: samples[:size])

    assert [len(part) for part in layout.split(samples, 6, (4, 2))] == [4, 2]


def test_samples_in_tuples_are_cut_as_a_whole():
    """`tuple(zip(*samples))`, as detection models collate: no target is looked into."""
    images = tuple(torch.zeros(3, 8, 8) for _ in range(4))
    boxes = tuple({"boxes": torch.zeros(count, 4)} for count in (4, 1, 2, 4))

    layout = Layout(lambda size: (images[:size], boxes[:size]))
    parts = layout.split((images, boxes), 4, (1, 3))

    assert [[len(field) for field in part] for part in parts] == [[1, 1], [3, 3]]
    assert [len(target["boxes"]) for target in parts[1][1]] == [1, 2, 4]
    assert len(layout.repeat((images, boxes), 4, 9)[0]) == 9


def test_what_is_not_per_sample_goes_to_every_part():
    """A scalar, a text, a mask over positions."""
    batch = {"x": X, "scale": torch.tensor(2.0), "task": "a", "mask": torch.ones(9, 9)}

    layout = Layout(lambda size: {**batch, "x": X[:size]})
    for part in layout.split(batch, 6, (2, 4)):
        assert (part["scale"], part["task"], part["mask"].shape) == (2.0, "a", (9, 9))


def test_rows_are_repeated():
    """More samples than there are: from the first again."""
    layout = Layout(lambda size: [X[:size], list("abcdef")[:size]])
    x, y = layout.repeat([X, list("abcdef")], 6, 8)

    assert torch.equal(x, torch.cat([X, X[:2]]))
    assert y == list("abcdefab")


def test_a_batch_without_samples_is_refused():
    """Nothing with one entry per sample: the error says what to do."""

    def packed(size):
        return {"packed": torch.zeros(1, 10 * size)}

    with pytest.raises(ValueError, match="Bounds\\(max"):
        Layout(packed).split(packed(6), 6, (3, 3))


def _leaves(item):
    if isinstance(item, dict):
        return [leaf for entry in item.values() for leaf in _leaves(entry)]
    if isinstance(item, Graphs):
        return [item.nodes, item.names]
    if isinstance(item, (list, tuple)) and isinstance(item[0], torch.Tensor):
        return list(item)
    return [item]
