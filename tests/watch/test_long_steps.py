"""Single steps that are far longer than the others: said while they last, counted at the end."""

import numpy as np
import pytest

from evenstep._diagnosis import Phase, StepClues
from evenstep.watch._long_steps import long_steps, under_way, usual_s
from evenstep.watch._step_records import RankReport, StepRecord

WHO = ["rank 0 (ann)", "rank 1 (bob)", "rank 2 (cy)"]


def rows(num_steps, *, long=(), phase=Phase.INPUT, seconds=1.0, together=1, shared=False):
    """Return steps of 0.1 s of three ranks; in long ones, rank 1 is so long in a phase."""
    found = []
    for at in range(num_steps):
        spent_us = np.zeros((3, len(Phase)), np.int64)
        spent_us[:, Phase.FORWARD] = 80_000 * together
        spent_us[:, Phase.REDUCTION] = 20_000 * together
        if at in long:
            spent_us[1, phase] += round(seconds * 1e6)
            spent_us[[0, 2], phase if shared else Phase.REDUCTION] += round(seconds * 1e6)
        step = (at + 1) * together - 1
        found.append(
            tuple(StepRecord(step, together, tuple(us), StepClues(), 4) for us in spent_us.tolist())
        )
    return found


def at(*phases, step=60, lasted_s=20.0, late=()):
    """Return the newest report of ranks in these phases; late ones are a step behind."""
    return [
        RankReport((), step=step - (rank in late), phase=phase, lasted_s=lasted_s)
        for rank, phase in enumerate(phases)
    ]


WAITS, INPUT, FORWARD = Phase.REDUCTION, Phase.INPUT, Phase.FORWARD


@pytest.mark.parametrize(
    ("phases", "late", "said"),
    [
        ((WAITS, INPUT, WAITS), (), "step 60 has lasted 20 s, and 0.1 s is usual: rank 1 (bob) is"),
        ((INPUT, FORWARD, WAITS), (1,), "usual: rank 1 (bob) is in the forward, and others wait"),
        ((WAITS, Phase.MEETING, WAITS), (), "all ranks wait for each other"),
    ],
)
def test_a_step_that_lasts_is_said_with_who_keeps_others_waiting(phases, late, said):
    """Of ranks that are in two steps, the one behind does."""
    lasted_s, found = under_way(at(*phases, late=late), 0.1, WHO)

    assert lasted_s == 20.0
    assert said in found


@pytest.mark.parametrize(
    ("newest", "usual"),
    [
        (at(WAITS, INPUT, WAITS, lasted_s=9.0), 0.1),
        (at(WAITS, INPUT, WAITS, lasted_s=40.0), 5.0),
        (at(WAITS, INPUT, WAITS, lasted_s=29.0), 0.0),
        (at(Phase.EVALUATION, Phase.EVALUATION, Phase.EVALUATION, lasted_s=900.0), 0.1),
    ],
    ids=["short", "as usual", "the first", "shared"],
)
def test_a_step_that_keeps_none_waiting_for_long_is_not_said(newest, usual):
    assert under_way(newest, usual, WHO) is None


def test_a_first_step_has_more_time_as_it_compiles():
    """A barrier before it, say."""
    _, found = under_way(at(Phase.REST, Phase.MEETING, WAITS, step=0, lasted_s=35.0), 0.0, WHO)

    assert found == (
        "step 0 has lasted 35 s: rank 0 (ann) is in what the loop does beside, and others wait"
    )


def test_a_single_pause_is_named_at_the_end():
    """Means would say that one rank or another waits for the network."""
    (said,) = long_steps(rows(200, long=[60], seconds=45.0), WHO)

    assert said == (
        "step 60 took 45 s, where 0.1 s is usual: rank 1 (bob) was waiting for input, and others "
        "waited, 69 % of the run"
    )


@pytest.mark.parametrize("together", [1, 4])
def test_pauses_of_one_rank_in_one_phase_are_counted_together(together):
    """Also where short steps are reported together."""
    long = [20, 60, 100]
    (said,) = long_steps(rows(120, long=long, phase=FORWARD, together=together, seconds=3.0), WHO)

    assert "usual (3 steps were long so)" in said
    assert "rank 1 (bob) was in the forward" in said


@pytest.mark.parametrize(
    "seen",
    [
        rows(200),
        rows(200, long=[60], phase=Phase.CHECKPOINT, seconds=45.0, shared=True),
        rows(200, long=[0], seconds=45.0),
        rows(200, long=[60], seconds=0.4),
        rows(8, long=[4], seconds=45.0),
    ],
    ids=["none", "shared", "the first", "short", "too few"],
)
def test_no_other_step_is_named(seen):
    assert long_steps(seen, WHO) == []


def test_the_usual_step_is_the_median():
    assert usual_s(rows(20, long=range(3), seconds=9.0, together=4)) == pytest.approx(0.1)
    assert usual_s([]) == 0.0
