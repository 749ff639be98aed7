"""Sharded models under a watch."""

import pytest

from .runs import events, losses, plain, said, torchrun, watched

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]


def test_fsdp2_waits_inside_forward_and_backward_are_told_from_computing(tmp_path):
    """Layers gather and reduce with the others: what is waited for in that is no computing."""
    alone = plain("fsdp2", SLOW="1")
    done = watched(torchrun("fsdp2"), run_dir=tmp_path, SLOW="1")

    assert losses(done) == alone
    assert "for rank 1 (" in said(done)[0]
    assert "because of compute" in said(done)[0]
    compute_s = [event["compute_s"] for event in events(tmp_path, "StepMeasured")][-1]
    assert compute_s[1] > 3 * compute_s[0]


def test_fsdp1_is_left_as_it_is(tmp_path):
    """Its waits cannot be told from computing, and are not claimed to be; losses are the same."""
    alone = plain("fsdp1", SLOW="1")
    done = watched(torchrun("fsdp1"), run_dir=tmp_path, SLOW="1")

    assert losses(done) == alone
    assert "off" not in done.stderr
    assert len(events(tmp_path, "StepsAccounted")) > 3
