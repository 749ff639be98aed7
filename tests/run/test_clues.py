"""In balanced runs, what a rank notices beside its times names the cause and the rank."""

import pytest

from evenstep.testing import run_workers

from .clue_runs import LATE, diagnosed_run, nested_run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cause", "rank", "words"),
    [
        ("garbage", "garbage collection", LATE, "Python's garbage collector takes"),
        ("busy", "contention", LATE, "it waits for a core for"),
        ("lengths", "lengths of samples", -1, "goes with the size of the inputs"),
    ],
)
def test_a_clue_names_cause_and_rank(tmp_path, kind, cause, rank, words):
    """By times alone: what the loop does, a rank that is slow throughout, one that rotates."""
    found, _ = run_workers(2, diagnosed_run, str(tmp_path), kind, 60)
    last = found[-1]
    causes = list(zip(last.causes, last.ranks, last.evidence, strict=True))
    first = next(one for one in causes if one[0] != "network")  # its part of such short steps

    assert first[:2] == (cause, rank), last
    assert words in first[2]


@pytest.mark.slow
def test_inputs_without_a_shape_train():
    """What explains waiting is looked at in every loop, and is no reason to end one."""
    assert run_workers(2, nested_run, 10) == [10, 10]
