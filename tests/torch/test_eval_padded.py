"""An evaluation by cost asks its collator whether it pads."""

from __future__ import annotations

from evenstep.testing import run_workers

from .eval_runs import padded_lengths


def test_forwards_of_a_collator_that_pads_have_samples_of_like_lengths() -> None:
    forwards = [one for rank in run_workers(2, padded_lengths) for one in rank]
    assert sorted(length for one in forwards for length in one) == list(range(1, 33))
    for lengths in forwards:
        assert lengths == list(range(lengths[0], lengths[0] + len(lengths)))
