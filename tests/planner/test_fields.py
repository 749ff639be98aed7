"""Lengths by name: of a column, of its lists, or of each sample's field."""

import numpy as np
import pytest
from torch.utils.data import Subset

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
