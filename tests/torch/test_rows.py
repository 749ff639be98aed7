"""Batches cut by their samples, whatever container they come in."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from evenstep.torch._memory._rows import repeat_rows, split_rows

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Graphs:
    """A batch of a user's own."""

    nodes: torch.Tensor
    names: list


X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)


@pytest.mark.parametrize(
    "batch",
    [
        [X, Y],
        (X, Y),
        Pair(X, Y),
        {"x": X, "more": {"y": Y}},
        Graphs(X, list("abcdef")),
        [X, Y, X, Y, X, Y],
    ],
    ids=["list", "tuple", "named tuple", "dicts", "dataclass", "as many fields as samples"],
)
def test_parts_put_together_are_the_batch(batch):
    """Each sample is in one part, in order, in every field."""
    parts = split_rows(batch, 6, (1, 3, 2))

    assert [type(part) for part in parts] == [type(batch)] * 3
    for fields in zip(_leaves(batch), *map(_leaves, parts), strict=True):
        whole, *pieces = fields
        assert [len(piece) for piece in pieces] == [1, 3, 2]
        if isinstance(whole, list):
            assert [entry for piece in pieces for entry in piece] == whole
        else:
            assert torch.equal(torch.cat(pieces), whole)


def test_lists_of_samples_are_cut():
    """A `collate_fn` that keeps samples apart gives a list of them."""
    samples = [torch.zeros(n + 10) for n in range(6)]

    assert [len(part) for part in split_rows(samples, 6, (4, 2))] == [4, 2]


def test_samples_in_tuples_are_cut_as_a_whole():
    """`tuple(zip(*samples))`, as detection models collate: no target is looked into."""
    images = tuple(torch.zeros(3, 8, 8) for _ in range(4))
    boxes = tuple({"boxes": torch.zeros(count, 4)} for count in (4, 1, 2, 4))

    parts = split_rows((images, boxes), 4, (1, 3))

    assert [[len(field) for field in part] for part in parts] == [[1, 1], [3, 3]]
    assert [len(target["boxes"]) for target in parts[1][1]] == [1, 2, 4]
    assert len(repeat_rows((images, boxes), 4, 9)[0]) == 9


def test_what_is_not_per_sample_goes_to_every_part():
    """A scalar, a text, a mask over positions."""
    batch = {"x": X, "scale": torch.tensor(2.0), "task": "a", "mask": torch.ones(9, 9)}

    for part in split_rows(batch, 6, (2, 4)):
        assert (part["scale"], part["task"], part["mask"].shape) == (2.0, "a", (9, 9))


def test_rows_are_repeated():
    """More samples than there are: from the first again."""
    x, y = repeat_rows([X, list("abcdef")], 6, 8)

    assert torch.equal(x, torch.cat([X, X[:2]]))
    assert y == list("abcdefab")


def test_a_batch_without_samples_is_refused():
    """Nothing with one entry per sample: the error says what to do."""
    with pytest.raises(ValueError, match="Bounds\\(max"):
        split_rows({"packed": torch.zeros(1, 100)}, 6, (3, 3))


def _leaves(item):
    if isinstance(item, dict):
        return [leaf for entry in item.values() for leaf in _leaves(entry)]
    if isinstance(item, Graphs):
        return [item.nodes, item.names]
    if isinstance(item, (list, tuple)) and isinstance(item[0], torch.Tensor):
        return list(item)
    return [item]
