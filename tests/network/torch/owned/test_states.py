"""State that moves from owner to owner, on ranks that are threads."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.network import Split
from evenstep.network.torch._owned._ownership import Ownership
from evenstep.network.torch._owned._shards import OwnedShards, cut_state
from evenstep.network.torch._owned._states import describe, gather, gather_entries, move

from . import runs
from .test_carrier import carriers

few = settings(max_examples=max(1, settings.default.max_examples // 3))
PLANS = st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), min_size=2)


def begun_states(parameters):
    """A state with a tensor as the parameter, one of another type, a count and a plain value."""
    return {
        index: {
            "buffer": torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)),
            "seen": torch.full_like(parameter, index % 7, dtype=torch.int16),
            "step": torch.tensor(float(index)),
            "plain": 0.5 * index,
        }
        for index, parameter in enumerate(parameters)
        if index % 3
    }


def split_of(shares, epoch):
    given_ = np.array(shares, float)
    return Split.of(given_ / given_.sum(), epoch=epoch, chunk_bytes=400, min_bytes=0)


def owned(optimizer, parameters, split, rank):
    layout = Ownership.of(parameters, split)
    shards = OwnedShards(optimizer, parameters, rank)
    whole = begun_states(parameters)
    states = {
        index: cut_state(state, parameters[index], layout.span(rank, index))
        for index, state in whole.items()
        if layout.owns(rank, index)
    }
    shards.adopt(layout, states)
    return shards


@few
@given(PLANS)
def test_state_is_the_same_whoever_owns_it(plans):
    """After every plan of any sequence; only what changes its owner travels."""

    def go(rank, carrier):
        model = runs.Net()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        shards = owned(optimizer, parameters, split_of(plans[0], 0), rank)
        for epoch, shares in enumerate(plans[1:], start=1):
            gather_entries(shards, carrier)
            begun = carrier.traffic.received_bytes
            gather_entries(shards, carrier)
            entries_bytes = carrier.traffic.received_bytes - begun
            old, new = shards.layout, Ownership.of(parameters, split_of(shares, epoch))
            begun = carrier.traffic.received_bytes
            shards.adopt(new, move(parameters, shards, new, carrier))
            moved_bytes = carrier.traffic.received_bytes - begun - entries_bytes
            assert moved_bytes == 6 * newly_owned(parameters, old, new, rank)
            assert runs.same_state(gather(parameters, shards, carrier), begun_states(parameters))
        return True

    assert all(carriers(3, go))


def newly_owned(parameters, old, new, rank):
    """Elements with a state that a rank owns by the new layout and did not by the old."""
    return sum(
        len(set(range(*indices(new, rank, i))) - set(range(*indices(old, rank, i))))
        for i in range(len(parameters))
        if i % 3 and parameters[i].dim()
    )


def indices(layout, rank, index):
    span = layout.span(rank, index)
    return span.start, span.stop


def test_a_state_of_another_shape_is_refused():
    """A sum over rows, as of an optimizer that is not element-wise."""
    parameter = torch.nn.Parameter(torch.ones(300))
    shards = OwnedShards(torch.optim.SGD([parameter], lr=0.1), [parameter], 0)
    layout = Ownership.of([parameter], split_of([1], 0))
    shards.adopt(layout, {0: {"rows": torch.ones(7)}})

    with pytest.raises(ValueError, match=r"must keep a value for each of 300 elements, or one for"):
        describe(shards)
