"""Ranks that differ in what changes results are refused in ``prepare``; others never are."""

from __future__ import annotations

import pytest

from evenstep.testing import run_workers

from . import compared_runs

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("world_size", "cases"), [(2, compared_runs.OF_TWO), (3, compared_runs.OF_THREE)]
)
def test_differences_between_ranks_are_refused_by_one_error_on_all(world_size, cases):
    """It names the setting, the values and the ranks: before the first loop, and without a hang."""
    results = run_workers(world_size, compared_runs.provoke, timeout_s=150)

    wrong = {
        name: results[0].get(name, "nothing was raised")
        for name, (_, text) in cases.items()
        if not results[0].get(name, "").startswith("ValueError") or text not in results[0][name]
    }
    assert wrong == {}
    assert all(result == results[0] for result in results)


def test_an_error_of_the_users_code_is_told_on_all_ranks():
    """The rank where it was raised has the error itself, the other its text."""
    own, told = run_workers(2, compared_runs.unreadable)

    assert own == "FileNotFoundError: list.txt"
    assert told == (
        "RuntimeError: `prepare` failed on rank 0, which has the traceback: "
        "FileNotFoundError: list.txt"
    )


def test_what_ranks_may_differ_in_is_not_refused():
    """Nor is randomness of any kind; and random states stay as they are."""
    for texts, noticed in run_workers(2, compared_runs.accept, timeout_s=150):
        assert texts == {}
        assert noticed == []
