"""What was saved comes back, whoever saved it and whatever it was."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from .checkpoint_runs import BUFFERS, FLOATS, OPTIMIZERS, Kind, Run, room, same

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
kinds = st.builds(
    Kind,
    shapes=st.lists(shapes, min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(FLOATS),
    buffers=st.lists(st.tuples(shapes, st.sampled_from(BUFFERS)), max_size=2).map(tuple),
    optimizer=st.sampled_from(OPTIMIZERS),
    in_epoch=st.integers(0, 9).map(lambda drawn: drawn == 9),
)
tensors = st.builds(
    lambda shape, dtype: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype),
    shapes,
    st.sampled_from(FLOATS + BUFFERS),
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars | tensors | st.binary(min_size=1),  # torch refuses empty ones, and so does `save`
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=settings().max_examples // 2)  # a load takes 10 ms
@given(
    kind=kinds,
    value=values,
    world_size=st.integers(0, 5),
    step=st.integers(0, 10**15 - 1),
    seed=st.integers(0, 99),
)
def test_what_was_saved_comes_back(kind, value, world_size, step, seed):
    """Bit by bit, from any number of ranks, or from `save` itself (0), into a run elsewhere."""
    with room() as root:
        saved = Run(root, kind).go(seed, value)
        if world_size:
            saved.write(step, world_size=world_size, seed=seed)
        else:
            saved.checkpoint.save(step)
        loaded = Run(root, kind).go(seed + 1) if seed % 3 else Run(root, kind)

        assert loaded.checkpoint.load() == step
        assert same(loaded.everything(), saved.everything())
        assert same(loaded.held.value, value)
