"""What was fixed in ``prepare`` and changes later: refused, never without effect."""

from __future__ import annotations

import pytest

from evenstep.testing import run_workers

from . import fixed_runs

pytestmark = pytest.mark.cluster


def test_what_changes_after_prepare_is_refused_with_the_remedy():
    """A loader's settings, the length of its data, and a model or a loader that comes later."""
    for texts in run_workers(2, fixed_runs.changed):
        for name, (_, text) in fixed_runs.CASES.items():
            assert text in texts[name]
            assert (
                "`balancer.close()`, then prepare the same model and the new loader" in texts[name]
            )


def test_the_remedy_trains_exactly():
    """The same model, with another batch size and more data, under what was learnt before."""
    for found in run_workers(2, fixed_runs.anew):
        assert [(size, samples) for size, samples, _ in found] == [(4, 24), (6, 48)]
        assert all(error < 1e-9 for _, _, error in found)
