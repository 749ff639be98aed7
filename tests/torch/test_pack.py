"""Samples on their way from a worker: what arrives is what was sent."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from evenstep.torch._data.fetch._chunks import batch_of, collate_chunk, pack

from .test_loader_order import assert_same


class Pair(NamedTuple):
    first: torch.Tensor
    second: str


TENSORS = {
    "rows": torch.arange(6.0).view(2, 3),
    "columns": torch.arange(6).view(2, 3).t(),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "complex": torch.ones(2, dtype=torch.complex64) * 1j,
    "bool": torch.tensor([True, False]),
    "conjugate": torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
    "gradient": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_any_tensor_arrives(name, copy):
    """Values, shape and type, whatever its memory looks like."""
    tensor = TENSORS[name]
    arrived = pack([tensor]).unpack(copy=copy)[0]

    assert arrived.dtype == tensor.dtype
    assert arrived.layout == tensor.layout
    assert torch.equal(arrived.to_dense(), tensor.to_dense())


@pytest.mark.parametrize("count", [10, 300_000], ids=["inline", "shared"])
def test_anything_else_arrives(count):
    """Arrays writable, other objects as they are, also with a megabyte in shared memory."""
    value = {
        "array": np.arange(count, dtype=np.float32),
        "fortran": np.asfortranarray(np.ones((2, 3))),
        "none": np.zeros((0, 2)),
        "objects": np.array(["a", None], dtype=object),
        "plain": (1, 2.5, "text", None, {"set"}),
        "pair": Pair(torch.ones(count), "b"),
    }
    packed = pack(value)
    arrived = packed.unpack(copy=True)

    assert (packed.num_shared > 0) == (count > 1000)
    for key in ("array", "fortran", "none", "objects"):
        np.testing.assert_array_equal(arrived[key], value[key])
        assert arrived[key].flags.writeable
    assert arrived["plain"] == value["plain"]
    assert isinstance(arrived["pair"], Pair)
    assert torch.equal(arrived["pair"].first, torch.ones(count))


def test_a_copy_is_apart():
    """What a `collate_fn` does to its samples does not reach those unpacked later."""
    packed = pack([torch.zeros(4), np.zeros(4)])
    for array in packed.unpack(copy=True):
        array += 1

    assert [array.sum() for array in packed.unpack(copy=False)] == [0, 0]


SAMPLES = {
    "tensors": lambda k: torch.full((2, 3), k),
    "numbers": lambda k: (k, k / 3, bool(k % 2), np.float32(k)),
    "texts": lambda k: f"sample {k}",
    "bytes": lambda k: {"raw": b"x" * k},
    "lists": lambda k: [torch.tensor(k), [str(k), k]],
    "pairs": lambda k: Pair(torch.tensor([k]), str(k)),
    "nothing": lambda k: (k, []),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("cuts", [(0, 7), (0, 1, 7), (0, 3, 4, 7)])
def test_chunks_laid_side_by_side_are_what_default_collate_makes(name, cuts):
    """Of the same samples, in the same order, with the same types."""
    samples = [SAMPLES[name](k) for k in range(9)]
    ends = [slice(a, b) for a, b in pairwise(cuts)]
    # One sample more on either side, which is not of this batch.
    chunks = [pack(collate_chunk([samples[8], *samples[part], samples[8]])) for part in ends]
    rows = [slice(1, 1 + part.stop - part.start) for part in ends]
    runs = list(zip(chunks, rows, strict=True))

    assert_same(batch_of(default_collate, collate_chunk, runs), default_collate(samples[:7]))


class Odd:
    """A type that torch was taught to collate, and we were not."""


def test_a_collated_type_of_the_users_own_is_refused(monkeypatch):
    """With the remedy; guessing how to lay such values side by side could go wrong in silence."""
    from torch.utils.data._utils.collate import default_collate_fn_map

    monkeypatch.setitem(default_collate_fn_map, Odd, lambda batch, **_: Odd())

    with pytest.raises(TypeError, match=r"made a Odd .* Pass `DataLoader\(collate_fn"):
        collate_chunk([Odd(), Odd()])
