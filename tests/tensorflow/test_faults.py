"""A worker of two fails, stops or hangs: the other ends with an error that names it, in time."""

from __future__ import annotations

import pytest

from .clusters import outcome

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(300)]
RAISED = "it raised ValueError: sample 17 has no label after step"
RAISED_IN_THE_FIRST = "it raised ValueError: sample 17 has no label before the end of a step"
HUNG = "it has not finished step 0 for 8 s while others wait"
SILENT = "it has been silent for"
GONE = "it ended, was killed, stopped or cut off before the first step"


@pytest.mark.parametrize(
    ("case", "victim", "words"),
    [
        ("raised_in_fit", 1, f"{RAISED} 2."),
        ("raised_in_the_graph", 1, RAISED_IN_THE_FIRST),
        ("raised_in_a_loop", 0, f"{RAISED} 2."),
        ("raised_and_caught", 1, f"{RAISED} 2."),
    ],
)
def test_an_exception_on_one_worker_is_told_to_the_other(tmp_path, case, victim, words):
    """By its type and the first line of its message, however it leaves the training."""
    told = outcome(tmp_path / "2", case, 2, victim)[1 - victim]

    assert told["rank"] == victim
    assert words in told["said"]


@pytest.mark.parametrize(
    ("case", "victim", "words"),
    [
        ("stopped_before_fit", 1, GONE),
        ("chief_stopped_before_a_loop", 0, GONE),
        ("stopped_in_an_evaluation", 1, SILENT),
        ("hung_in_the_first_step", 1, HUNG),
    ],
)
def test_a_worker_that_stands_still_is_named(tmp_path, case, victim, words):
    """Wherever it is: TensorFlow itself would wait for ever, or name a port."""
    told = outcome(tmp_path / "2", case, 2, victim)[1 - victim]

    assert told["rank"] == victim
    assert words in told["said"]
