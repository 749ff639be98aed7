"""In balanced runs, what a rank notices beside its times names the cause and the rank."""

import pytest

from evenstep.testing import run_workers

from .clue_runs import LATE, diagnosed_run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("garbage", "garbage collection", "Python's garbage collector takes"),
        ("busy", "contention", "it waits for a core for"),
    ],
)
def test_a_clue_names_cause_and_rank(tmp_path, kind, cause, words):
    """By times alone, it would be what the loop does, and a rank that is slow throughout."""
    found, _ = run_workers(2, diagnosed_run, str(tmp_path), kind, 60)
    last = found[-1]

    assert (last.causes[0], last.ranks[0]) == (cause, LATE), last
    assert words in last.evidence[0]
