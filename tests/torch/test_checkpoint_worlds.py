"""A checkpoint loads on another number of ranks, and under another wrapping."""

from __future__ import annotations

import pytest
import torch

from evenstep.testing import run_workers

from .checkpoints import apart, bytes_told, refused_on_one, sharded, unwritten


@pytest.mark.cluster
@pytest.mark.parametrize(("before", "after"), [("fsdp", "ddp"), ("ddp", "fsdp")])
def test_any_world_size_and_wrapping_loads_what_another_saved(tmp_path, before, after):
    """Sharded over 3 and whole on 2, or the other way round: the same parameters and moments."""
    folder = str(tmp_path)
    saved = run_workers(3 if before == "fsdp" else 2, sharded, folder, 5, before)
    loaded = run_workers(2 if before == "fsdp" else 3, sharded, folder, None, after)

    for step, tensors in loaded:
        assert step == 5
        assert all(map(torch.equal, tensors, saved[0][1]))


@pytest.mark.cluster
@pytest.mark.parametrize("error", [ValueError("another batch"), KeyError("gone")])
def test_what_one_rank_refuses_none_loads(tmp_path, error):
    """All of them raise what it was, and where; none waits, and none has a part of it."""
    kind = "ValueError" if isinstance(error, ValueError) else "CheckpointError"
    for message, unchanged in run_workers(2, refused_on_one, str(tmp_path), error, timeout_s=60):
        assert message.startswith(kind)
        assert f"on rank 1, {type(error).__name__}: {error}" in message
        assert unchanged


@pytest.mark.cluster
def test_folders_that_are_not_shared_are_noticed(tmp_path):
    """Before anything is trusted to them, on every rank."""
    for message in run_workers(2, apart, str(tmp_path)):
        assert "is not the same folder on all ranks: rank 1 does not see" in message


@pytest.mark.cluster
def test_an_index_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    """As on a full disk: rank 0 alone writes it, and the others would wait for rank 0."""
    for message in run_workers(2, unwritten, str(tmp_path), timeout_s=60):
        assert "index.pt" in message
        assert "Is a directory" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cluster
def test_what_rank_zero_writes_is_not_gathered(tmp_path):
    """It is alike on all ranks, and may be as large as the model: each would hold all of them."""
    assert max(run_workers(2, bytes_told, str(tmp_path), timeout_s=60)) < 10_000
