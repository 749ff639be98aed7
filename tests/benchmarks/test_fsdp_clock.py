"""The clock for FSDP2 in plain loops, as its benchmark has it."""

import threading
from statistics import median

import numpy as np
import pytest

from benchmarks._fsdp_marks import (
    CALL,
    CALLED,
    HANDOUT,
    OWN_END,
    WAIT,
    WAITED,
    Meeting,
    Ring,
    noting,
    steps_of,
)
from benchmarks.fsdp_clock import NUM_LAYERS, NUM_WARM, Cell, replayed, train
from evenstep.testing import run_workers

MS = 1_000_000


def test_nested_intervals_count_once():
    """A wait in a collective is no second one, and a wait by itself is one too."""
    notes = [
        *((WAIT, 0), (WAITED, 5)),  # before the first batch
        *((HANDOUT, 10), (CALL, 20), (WAIT, 22), (WAITED, 27), (CALLED, 30)),
        *((WAIT, 50), (WAITED, 60), (OWN_END, 90), (CALL, 92), (CALLED, 97), (HANDOUT, 100)),
    ]
    (step,) = steps_of((what, at * MS) for what, at in notes)

    assert step.seconds == pytest.approx(0.090)
    assert step.own_s == pytest.approx(0.060)
    assert step.met_s == pytest.approx([0.010, 0.010, 0.005])
    assert step.parts_s == pytest.approx([0.010, 0.020, 0.032, 0.003])
    assert [each[2:] for each in step.meetings] == [(True, True), (False, True), (True, False)]


def test_a_prefetched_gather_gives_slack():
    """A rank that is late in one layer and early in the next costs less than in each by itself."""
    parts = np.array([[[1.0, 3.0, 1.0]], [[1.0, 1.0, 3.0]]])
    met = np.zeros((2, 1, 2))
    one, later = Meeting(0, 0, True, True), [Meeting(0, 0, *is_) for is_ in ((1, 0), (0, 1))]

    assert replayed(parts, met, [one, one]) == [parts.max(axis=0).sum()] == [7]
    assert replayed(parts, met, later) == [parts.sum(axis=-1).max()] == [5]


def test_a_ring_says_what_its_reader_missed():
    """Its array is as long as before, and the newest notes are there."""
    ring = Ring(8)
    for _ in range(3):
        ring.note(HANDOUT)
    assert [what for what, _ in ring.read()] == [HANDOUT] * 3
    for _ in range(10):
        ring.note(WAIT)

    times = [at for what, at in ring.read() if what == WAIT]
    assert (len(times), ring.num_lost, ring.num_noted) == (8, 2, 13)
    assert times == sorted(times)
    assert list(ring.read()) == []


def test_what_is_noted_gives_and_raises_what_it_did():
    """An end is noted either way; other threads note nothing."""
    ring = Ring()
    assert noting(divmod, ring, CALL)(7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        noting(divmod, ring, WAIT)(1, 0)
    other = threading.Thread(target=noting(divmod, ring, CALL), args=(7, 2))
    other.start()
    other.join()

    assert [what for what, _ in ring.read()] == [CALL, CALLED, WAIT, WAITED]


@pytest.mark.alone
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("reshards", [True, False])
def test_the_fast_rank_waits_and_the_slow_one_does_not(reshards):
    """Own time is as the speeds are, though both have the same steps, and losses are the same."""
    row_s = ((0.010,) * NUM_LAYERS, (0.005,) * NUM_LAYERS)
    cell = Cell("speeds 1:2", row_s, ((4, 4),) * 3, reshards)
    found = run_workers(2, train, cell, 3, True, True)
    plain = run_workers(2, train, cell, 3, False, False)
    slow, fast = (each.steps[NUM_WARM:] for each in found)

    assert [each.losses for each in found] == [each.losses for each in plain]
    assert {len(step.met_s) for step in slow + fast} == {NUM_LAYERS * (2 + reshards) + 2}
    assert 1.5 < median(step.own_s for step in slow) / median(step.own_s for step in fast) < 2.5
    assert 0.9 < median(step.seconds for step in slow) / median(step.seconds for step in fast) < 1.1
    slow_waits, fast_waits = (median(sum(step.met_s) for step in each) for each in (slow, fast))
    assert slow_waits < fast_waits / 2
