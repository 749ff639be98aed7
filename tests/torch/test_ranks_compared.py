"""Ranks that differ in what changes results are refused in ``prepare``; others never are."""

from __future__ import annotations

import pytest

from evenstep.testing import run_workers

from . import ranks_compared

pytestmark = pytest.mark.cluster


def test_differences_between_ranks_are_refused_by_one_error_on_all():
    """It names the setting, the values and the ranks: before the first loop, and without a hang."""
    results = run_workers(2, ranks_compared.provoke, list(ranks_compared.DIFFERENT), timeout_s=150)

    wrong = {
        name: results[0].get(name, "nothing was raised")
        for name, (_, text) in ranks_compared.DIFFERENT.items()
        if not results[0].get(name, "").startswith("ValueError") or text not in results[0][name]
    }
    assert wrong == {}
    assert results[0] == results[1]


def test_what_ranks_may_differ_in_is_not_refused():
    """Nor is randomness of any kind; and random states stay as they are."""
    for texts, noticed in run_workers(2, ranks_compared.accept, timeout_s=150):
        assert texts == {}
        assert noticed == []
