"""Lengths by name: of a column, of its lists, or of each sample's field."""

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from evenstep._planner import batch_lengths
from evenstep.torch import Cost

ROWS = [[7, 7, 7], [7], [7, 7]]


class Columns:
    """What a data set of Hugging Face answers: a column by name, a row by index."""

    def __init__(self, **columns):
        self._columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._columns[key]
        return {"text": "abc"[key], "input_ids": ROWS[key]}


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        pytest.param(Columns(length=[3, 1, 2]), "length", id="a column of lengths"),
        pytest.param(Columns(input_ids=ROWS), "input_ids", id="of lists"),
        pytest.param(Columns(ids=[np.array(row) for row in ROWS]), "ids", id="of arrays"),
        pytest.param([{"input_ids": row} for row in ROWS], "input_ids", id="a field of samples"),
        pytest.param(Columns(text=list("abc")), "input_ids", id="made by a transform"),
    ],
)
def test_lengths_come_by_name(dataset, name):
    """The same for each kind of data set, and for a part of it."""
    lengths = Cost(name).read(dataset).of
    of_part = Cost(name).read(Subset(dataset, [2, 0])).of

    assert lengths.tolist() == [3, 1, 2]
    assert of_part.tolist() == [2, 3]


@pytest.mark.parametrize("dataset", [Columns(input_ids=ROWS), [{"input_ids": row} for row in ROWS]])
def test_what_has_no_such_name_is_refused(dataset):
    """The message says what there is."""
    with pytest.raises(ValueError, match=r"name a column .*'size' for a .*'input_ids'"):
        Cost("size").read(dataset)


SAMPLES = [{"input_ids": row, "text": "abc"} for row in ROWS]
MASK = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0]])


@pytest.mark.parametrize(
    ("of", "batch"),
    [
        pytest.param("input_ids", {}, id="a field of samples"),
        pytest.param("length", {"length": [3, 1, 2]}, id="lengths in the batch"),
        pytest.param("length", {"length": torch.tensor([3, 1, 2])}, id="a tensor of them"),
        pytest.param("ids", {"ids": ROWS}, id="lists in the batch"),
        pytest.param("mask", {"mask": torch.tensor(MASK)}, id="a mask"),
        pytest.param("mask", {"mask": torch.tensor(MASK > 0)}, id="of truth values"),
        pytest.param(lambda _, batch: batch[1].sum(1), (0, torch.tensor(MASK)), id="by batch"),
        pytest.param(
            lambda samples, _: [len(one["input_ids"]) for one in samples], None, id="by samples"
        ),
    ],
)
def test_lengths_come_from_a_batch(of, batch):
    """By name or by function, of samples or of their batch; and the batch as it is."""
    made, lengths = batch_lengths(of, SAMPLES, lambda samples: batch)

    assert made is batch
    assert lengths.tolist() == [3, 1, 2]


def test_a_collator_may_change_its_samples():
    """A field that it takes away was measured before."""
    samples = [dict(one) for one in SAMPLES]
    _, lengths = batch_lengths("input_ids", samples, lambda some: [one.clear() for one in some])

    assert lengths.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ("size", r"name a field of the samples, .* 'size' for a batch with \['ids'\]"),
        ("ids", r"'ids', whose rows are filled up. Name the mask"),
        (
            lambda _, batch: [3, 1],
            r"for each of the 3 samples .*int64 of shape \(2,\)",
        ),
        (lambda _, batch: [3.0, 1.0, 2.0], "integer from 0 to 16777216.*float64"),
        (lambda _, batch: [3, -1, 2], "integer from 0 to 16777216.*from -1 to 3"),
        (lambda _, batch: [3, 1 << 40, 2], "to 1099511627776. Count .* in thousands"),
    ],
)
def test_what_is_no_length_in_a_batch_is_refused(of, words):
    """With what was found, and the remedy."""
    with pytest.raises(ValueError, match=words):
        batch_lengths(of, SAMPLES, lambda samples: {"ids": torch.tensor(7 * MASK)})
