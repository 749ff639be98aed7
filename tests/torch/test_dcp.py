"""Loader and balancer in a checkpoint that `torch.distributed.checkpoint` writes."""

from __future__ import annotations

from functools import cache
from itertools import chain

import pytest
import torch

from evenstep.testing import run_workers

from .._tiers import slow_but
from .dcp_runs import NUM_SAMPLES, gone_on, refusals, saved, unbroken

KINDS = [(kind, background) for kind in ("ddp", "fsdp2") for background in (False, True)]
plain = cache(unbroken)


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "background"), slow_but([("ddp", True)], KINDS))
def test_a_run_goes_on_from_a_folder_of_torchs_own(tmp_path, kind, background):
    """Saved on 3 ranks within an epoch, gone on with on 2: samples and parameters of one process.

    What was learnt of the workers comes along, from rank 0 alone.
    """
    before = run_workers(3, saved, str(tmp_path), kind, background)
    after = run_workers(2, gone_on, str(tmp_path), kind)

    steps = [list(chain(*parts)) for parts in zip(*before, strict=True)]
    steps += [list(chain(*parts)) for parts in zip(*(found for found, _, _ in after), strict=True)]
    expected, parameters = plain()
    assert [sorted(step) for step in steps] == [sorted(step) for step in expected]
    assert sorted(chain(*steps[:6])) == list(range(NUM_SAMPLES))
    for _, found, _ in after:
        torch.testing.assert_close(found, parameters, rtol=0, atol=1e-12)
    assert [known for _, _, known in after] == [[(True, True)], []]


@pytest.mark.cluster
def test_a_damaged_or_foreign_folder_is_refused(tmp_path):
    """By torch where files or names are missing, by the loader where its state is wrong."""
    for found in run_workers(2, refusals, str(tmp_path)):
        assert found.pop("good") == "none"
        assert found["cut short"].startswith("CheckpointException: ")
        assert "Missing key in checkpoint state_dict: loader." in found["without a loader"]
        wrong = "ValueError: `BalancedLoader.load_state_dict(state=...)` must "
        assert found["another position"].startswith(f"{wrong}come from `state_dict()`")
        assert "the file is damaged" in found["another position"]
        assert found["another batch"].startswith(f"{wrong}be of the global batch size 30, got 24.")
