"""A worker that dies or hangs ends the others with an error that names it, in time."""

import signal

import pytest

from evenstep.testing import WorkerFailed, run_workers

from .faults import WATCHFUL, hang_in_the_all_reduce, leave_early, train

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_the_survivors_name_the_victim(victim, sent):
    """Killed or stopped, rank 0 or another: no hang, an error within the deadline."""
    answers = 2 if sent == signal.SIGSTOP else 3  # a stopped process never says that it is
    results = run_workers(3, train, victim, sent, timeout_s=15, check=False, stop_after=answers)

    assert isinstance(results[victim], WorkerFailed)
    for rank in {0, 1, 2} - {victim}:
        message, named, seconds = results[rank]
        assert named == victim, message
        assert f"Rank {victim} on " in message
        assert "Restart the run from its last checkpoint" in message
        # Generous: what must not happen is the half hour that a collective would wait.
        assert seconds < WATCHFUL.deadline_s + 8


def test_a_collective_that_hangs_does_not_hold_the_others_for_ever(tmp_path):
    """Stuck in an all-reduce that cannot be interrupted, they end by themselves and say why."""
    results = run_workers(
        3, hang_in_the_all_reduce, str(tmp_path), timeout_s=20, check=False, stop_after=2
    )

    for rank in (0, 1):
        assert "died without a word" in str(results[rank])
        text = (tmp_path / f"{rank}.log").read_text()
        assert "Rank 2 on " in text
        assert "waits in vain and is ended" in text


def test_a_rank_that_leaves_early_is_named():
    """Whoever ends its run before the others is no silent hang either."""
    results = run_workers(3, leave_early, timeout_s=15)

    assert results[1] == "left"
    for rank in (0, 2):
        assert "Rank 1 on " in results[rank]
        assert "it ended its run after step 2" in results[rank]
