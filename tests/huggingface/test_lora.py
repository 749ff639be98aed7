"""LoRA by the lengths of samples: adapters end where one process ends, and the base stays."""

from __future__ import annotations

import pytest

from evenstep.testing import run_workers

from .lora_runs import BATCH_SIZE, KINDS, alone, balanced
from .small import distance

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """One process of plain torch, by kind."""
    return run_workers(1, alone, str(tmp_path_factory.mktemp("alone")))[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_adapters_are_those_of_one_process(tmp_path, theirs, world_size):
    """Every A and B within 1e-9, under costs that change after every step; nothing else moves."""
    found = run_workers(world_size, balanced, str(tmp_path), world_size)

    for ours, name in ((rank[name], name) for rank in found for name in KINDS):
        assert ours.adapters.keys() == theirs[name].adapters.keys()
        for key, adapter in ours.adapters.items():
            assert distance(adapter, theirs[name].adapters[key]) <= 1e-9
            assert distance(adapter, ours.first[key]) >= 1e-2
        assert ours.base_stayed
    for name in KINDS:
        steps = list(zip(*(rank[name].counts for rank in found), strict=True))
        assert [sum(step) for step in steps] == theirs[name].counts
        assert any(len(set(step)) > 1 for step in steps if sum(step) == BATCH_SIZE)
