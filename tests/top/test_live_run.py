"""Events in, figures out: who costs how much, where the time goes, in constant memory."""

import sys
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._top import LiveRun
from evenstep.events import (
    LossNotFinite,
    MemoryCapped,
    PolicyFailed,
    Rebalanced,
    RunEnded,
    WorkerLost,
)

from .runs import DIAGNOSED, accounted, events, measured, started


def told(*parts):
    run = LiveRun()
    for event in parts:
        run.add(event)
    return run


def test_the_rank_that_others_wait_for_stands_first():
    """By what it takes more than the median rank; the others by how long they take."""
    ranks = told(*events()).ranks()

    assert [one.rank for one in ranks] == [1, 0, 2, 3]
    assert ranks[0].lost_s == pytest.approx(0.1)
    assert [one.lost_s for one in ranks[1:]] == [0.0] * 3
    assert (ranks[0].compute_s, ranks[0].batch_size) == (pytest.approx(0.3), 32)
    assert ranks[0].speed == pytest.approx(32 / 0.3)
    assert ranks[1].waiting_s == pytest.approx(0.05)  # by the account
    assert len(ranks[0].own_s) == 10


def test_a_rank_that_waits_for_its_input_is_waited_for_too():
    """Not its computing alone makes others wait."""
    slow = measured(0)
    slow = type(slow)(
        **{name: getattr(slow, name) for name in slow.__slots__} | {"data_s": (0, 0, 0.5, 0)}
    )

    assert told(started(), slow).ranks()[0].rank == 2


def test_of_two_ranks_one_loses_all_that_the_other_takes_longer():
    """As long as it waits; half of that is what the mean of the two would say."""
    ranks = told(started(2), *(measured(step, 2) for step in range(10))).ranks()

    assert [one.lost_s for one in ranks] == pytest.approx([0.1, 0.0])
    assert ranks[1].waiting_s == pytest.approx(0.1)


def test_a_culprit_that_changes_costs_each_its_part():
    """What a rank costs is the mean of all steps."""
    ranks = told(started(), *(measured(step, slow=step % 2) for step in range(10))).ranks()

    assert [one.lost_s for one in ranks] == pytest.approx([0.05, 0.05, 0, 0])


def test_what_balancing_saved_is_of_all_steps():
    """Against whole steps with the equal split, as in the progress line."""
    run = told(*events(1 + 100))

    assert run.whole.wall_s == pytest.approx(100 * 0.32)
    assert run.whole.equal_s == pytest.approx(100 * 0.42)
    assert (run.first_step, run.num_measured) == (0, 101)


def test_the_time_left_is_that_of_the_epoch():
    """At the pace of now; none of a stream, or after the end."""
    assert told(*events(11)).left_s == pytest.approx(89 * 0.32)
    assert told(started(num_steps=0), measured(0), measured(1)).left_s is None
    assert told(*events(11), RunEnded(11)).left_s is None


def test_a_run_that_begins_again_is_another_one():
    """By its start, or by steps that go back where the start was not read."""
    again = told(*events(), DIAGNOSED, started(2), measured(5, 2))
    back = told(*events(), DIAGNOSED, measured(5))

    assert (again.num_measured, again.first_step, again.diagnosis) == (1, 5, None)
    assert (back.num_measured, back.first_step, back.diagnosis) == (1, 5, None)
    assert len(again.ranks()) == 2


def test_causes_stand_beside_their_ranks():
    """As last diagnosed."""
    assert [one.cause for one in told(*events(), DIAGNOSED).ranks()] == ["slow worker", "", "", ""]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (MemoryCapped(3, 1, 40, 1), "step 3: rank 1 fits at most 40 samples"),
        (PolicyFailed(3, "KeyError: 1", "Mine"), "the policy Mine failed"),
        (LossNotFinite(3, (0, 2)), "first on rank 0 and rank 2"),
        (WorkerLost(3, 1, "node0", "silent for 30 s"), "rank 1 on node0 was lost after step 3: si"),
    ],
)
def test_faults_and_news_are_said(event, words):
    """In the words of the progress line and the log."""
    (text,) = told(started(), event).news

    assert words in text


def test_nothing_is_known_before_the_first_step():
    """And nothing fails."""
    for run in (told(), told(started()), told(accounted(0))):
        assert (run.ranks(), run.left_s, run.last) == ([], None, None)


def size_of(thing, seen=None):
    """Bytes of a value and of all that it holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, type | MappingProxyType):
        return 0
    seen.add(id(thing))
    held = []
    if hasattr(thing, "__dict__"):
        held.append(vars(thing))
    held += [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    if isinstance(thing, dict):
        held += [*thing, *thing.values()]
    elif not isinstance(thing, str | bytes) and hasattr(thing, "__iter__"):
        held += list(thing)
    return sys.getsizeof(thing) + sum(size_of(each, seen) for each in held)


@given(data=st.data())
def test_memory_is_bounded_whatever_comes(data):
    """By the number of ranks, and by nothing else: neither steps, nor reasons, nor faults."""
    run, world_size = LiveRun(), data.draw(st.integers(1, 8))
    kinds = st.lists(st.sampled_from(("step", "account", "plan", "fault")), min_size=1, max_size=9)
    pattern, length = data.draw(kinds), data.draw(st.sampled_from((1, 200_000)))
    make = {
        "step": lambda step: measured(step, world_size),
        "account": lambda step: accounted(step, world_size),
        "plan": lambda step: Rebalanced(step, step, (32,) * world_size, "y" * (length + step)),
        "fault": lambda step: PolicyFailed(step, "y" * (length + step), "Mine"),
    }
    run.add(started(world_size))
    for step in range(300):
        run.add(make[pattern[step % len(pattern)]](step))

    assert size_of(run) < 500_000
