"""What is asked for and when: the nearest step first, only what is owned, nothing twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.torch._data.deal._plans import Share, StepSpan
from evenstep.torch._data.fetch._chunks import Packed
from evenstep.torch._data.fetch._sources import Horizon, StepWork


def share(*slots, forwards=None):
    return Share(np.array(slots, np.int64), forwards or (len(slots),))


def indices(first, num_samples):
    return np.arange(first, first + num_samples)


def chunk():
    return Packed(b"", (), ())


def horizon(shares, *, num_steps=3, num_workers=2):
    """Return a horizon over steps of 8 samples that are owned as `shares` says."""
    ahead = Horizon(num_steps=num_steps, num_workers=num_workers)
    ahead.begin([StepSpan(step, 8 * step, 8) for step in range(6)], indices)
    ahead.replan(lambda span: shares[span.step])
    return ahead


def asked(ahead):
    """Ask until nothing is left, and return (step, slots)."""
    return [(work.span.step, slots.tolist()) for work, slots in iter(ahead.ask, None)]


def test_the_nearest_step_comes_first():
    """And no further than the horizon."""
    ahead = horizon([share(0, 1), share(3), share(5, 6), share(7), share(7), share(7)])

    assert asked(ahead) == [(0, [0]), (0, [1]), (1, [3]), (2, [5]), (2, [6])]
    ahead.works.popleft()
    ahead.replan(lambda span: share(7) if span.step == 3 else share(3))
    assert asked(ahead) == [(2, [3]), (3, [7])]


def test_what_is_not_drawn_yet_is_not_asked_for():
    """The order is drawn at the plan point; until then the horizon ends there."""
    drawn = [16]
    ahead = Horizon(num_steps=4, num_workers=2)
    spans = (StepSpan(step, 8 * step, 8) for step in range(6))
    ahead.begin(spans, lambda first, num: indices(first, num) if first < drawn[0] else None)
    ahead.replan(lambda span: share(2))
    assert asked(ahead) == [(0, [2]), (1, [2])]

    drawn[0] = 48
    ahead.replan(lambda span: share(2))
    assert asked(ahead) == [(2, [2]), (3, [2])]


def test_without_a_plan_nothing_is_asked_for():
    """The first plan point of a run has to come first."""
    ahead = Horizon(num_steps=3, num_workers=2)
    ahead.begin([StepSpan(0, 0, 8)], indices)
    ahead.replan(lambda span: None)

    assert not ahead.works
    assert ahead.ask() is None


@pytest.mark.parametrize(
    ("sample_s", "sizes"),
    [
        (0.005, [2, 2, 2, 1, 1]),  # the last two shared out among two workers
        (0.1, [1] * 8),
        (0.0025, [3, 3, 1, 1]),
        (0.0005, [4, 3, 1]),
        (0.00001, [8]),  # not worth sharing out
    ],
)
def test_chunks_take_some_milliseconds(sample_s, sizes):
    """And leave something for every worker where that pays."""
    ahead = horizon([share(*range(8))] * 6, num_steps=1)
    ahead.learn(1, sample_s)

    assert [len(slots) for _, slots in asked(ahead)] == sizes


def test_speed_is_learnt_step_by_step():
    """One slow sample does not shrink the chunks for long."""
    ahead = horizon([share(*range(8))] * 6, num_steps=1)
    ahead.learn(10, 0.01)
    ahead.learn(1, 0.006)

    assert len(ahead.ask()[1]) == 4


@given(data=st.data())
@settings(max_examples=2 * settings().max_examples)
def test_plans_that_swing_ask_for_nothing_twice(data):
    """Only what is owned is asked for; what was fetched before is found when it comes back."""
    owned = st.sets(st.integers(0, 7), min_size=1).map(sorted)
    work = StepWork(StepSpan(0, 0, 8), share(*data.draw(owned)), np.arange(8))
    requested: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        slots = data.draw(owned)
        work.replan(share(*slots))
        for size in data.draw(st.lists(st.integers(1, 3), max_size=4)):
            batch = work.ask(size)
            requested += batch.tolist()
            assert set(batch.tolist()) <= set(slots)
            if len(batch):
                work.store(batch, chunk())
        assert work.is_complete() == (set(slots) <= set(requested))

    assert len(requested) == len(set(requested))


def rows_of(work):
    """Where the samples of each of its forwards lie."""
    return [work.rows_of(slots) for slots in work.share.of_forwards()]


def test_batches_are_in_the_order_of_positions():
    """Wherever their samples came from; side by side in a chunk is one run."""
    work = StepWork(StepSpan(0, 0, 8), share(0, 1, 2, 3, 5, 6, forwards=(4, 2)), np.arange(8))
    one, two = chunk(), chunk()
    work.store(np.array([1, 2, 6]), one)
    work.store(np.array([0, 3, 5]), two)

    assert [
        [(own is one, rows.start, rows.stop) for own, rows in part] for part in rows_of(work)
    ] == [
        [(False, 0, 1), (True, 0, 2), (False, 1, 2)],
        [(False, 2, 3), (True, 2, 3)],
    ]


def test_a_share_without_samples_fetches_one_to_stand_in():
    """The step's first."""
    work = StepWork(StepSpan(0, 0, 8), share(), np.arange(8))

    assert work.ask(5).tolist() == [0]
    work.store(np.array([0]), chunk())
    assert work.is_complete()
    assert [rows for _, rows in rows_of(work)[0]] == [slice(0, 1)]
