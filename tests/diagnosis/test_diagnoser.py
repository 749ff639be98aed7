"""Who the others wait for, and why: each cause in runs that are disturbed, none in others."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._recorded_runs import drawn, feed
from evenstep._diagnosis import Cause, Diagnoser, HostClues, Phase, StepClues
from evenstep.events import to_record

from .runs import names, shown, steps


@pytest.mark.parametrize("cause", list(Cause))
@pytest.mark.parametrize("seed", [3, 5])
def test_a_cause_is_named_first_with_its_rank(cause, seed):
    """In simulated runs with noise, whatever their length, model and severity."""
    run = drawn(seed, [cause])
    (injected,) = run.injections
    found = feed(run).diagnose()

    assert names(found)[0] == (cause, injected.rank)
    assert found.evidence[0]
    assert found.remedy[0]
    assert found.no_verdict == ""


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_named_where_ranks_differ_by_chance(seed):
    """And it says why."""
    found = feed(drawn(seed, [])).diagnose()

    assert found.causes == ()
    assert "wait for others in" in found.no_verdict


@pytest.mark.parametrize("every", [100, 150])
def test_a_few_long_steps_are_not_called_small_differences(every):
    """As an evaluation on one rank now and then: no cause yet, but whose they are is said."""

    def late(step, rank):
        return {"EVALUATION": 10_000_000} if rank == 0 and step % every == every - 1 else {}

    found = shown(steps(210, 3, late=late)).diagnose(whole_run=True)

    assert found.causes == ()
    assert "mostly for rank 0: the optimizer, an evaluation or the rest" in found.no_verdict
    assert f"in about {210 // every} of 207 steps" in found.no_verdict


@pytest.mark.parametrize(
    ("fast", "world_size", "named"), [([0], 4, "mostly rank 0,"), ([1, 5], 8, "mostly 2 of the 8")]
)
def test_few_ranks_that_are_faster_are_not_called_small_differences(fast, world_size, named):
    """Most ranks are as slow as is usual, so none of them is to blame."""

    def late(step, rank):
        return {} if rank in fast else {"FORWARD": 30_000, "BACKWARD": 60_000}

    found = shown(steps(100, world_size, late=late)).diagnose()

    assert found.causes == ()
    assert found.waiting_share > 0.1
    assert named in found.no_verdict


@pytest.mark.parametrize("whole_run", [False, True])
def test_the_waiting_share_is_what_ranks_truly_wait(whole_run):
    """Half of the time one of two ranks waits 40 ms of 140: a seventh of all ranks' time."""
    slow = steps(100, 2, late=lambda step, rank: {"BACKWARD": 40_000 * rank})
    found = shown(slow).diagnose(whole_run=whole_run)

    assert found.waiting_share == pytest.approx(20 / 140, abs=0.01)
    assert found.explained_share == pytest.approx(1.0, abs=0.01)
    assert found.step_s == pytest.approx(0.140, rel=0.01)
    assert names(found) == [(Cause.SLOW_BACKWARD, 1)]
    assert found.lost_share[0] == pytest.approx(20 / 140, abs=0.01)


def test_a_rank_that_hides_behind_another_one_gets_its_part():
    """Rank 1 is late by 60 ms and rank 2 by 40: 20 are rank 1's, and the 40 are shared."""

    def late(step, rank):
        return {"INPUT": 60_000} if rank == 1 else {"REST": 40_000} if rank == 2 else {}

    found = shown(steps(100, 4, late=late)).diagnose()

    assert names(found) == [(Cause.INPUT, 1), (Cause.LOGGING, 2)]
    first, second = found.lost_share
    assert first / second == pytest.approx(2.0, rel=0.1)  # 20 + 20 to 20
    assert first + second == pytest.approx(0.75 * 60 / 160, abs=0.01)


def test_what_a_wait_before_the_input_has_levelled_is_not_counted_again():
    """Rank 0 saves before a mean in which rank 1 waits; then rank 1 is late by its input."""
    found = steps(100, 2)
    for step, rows in enumerate(found):
        rows[0][Phase.CHECKPOINT] += 50_000
        rows[1][Phase.MEAN] += 50_000
        rows[1][Phase.INPUT] += 50_000
        rows[0][Phase.REDUCTION] += 50_000 * (step > 0)  # for the input that led to this step
    told = shown(found).diagnose()

    assert told.explained_share == pytest.approx(1.0, abs=0.05)
    assert sorted(names(told)) == [(Cause.CHECKPOINT, 0), (Cause.INPUT, 1)]
    assert told.lost_share == pytest.approx([25 / 200] * 2, abs=0.01)


def test_waiting_that_no_own_time_explains_leaves_no_verdict():
    """One is late by its input; but they wait for much longer, and nothing says why."""
    found = steps(60, 2, late=lambda step, rank: {"INPUT": 30_000 * rank})
    for rows in found:
        rows[0][Phase.REDUCTION] += 100_000
    told = shown(found).diagnose()

    assert told.waiting_share > 0.2
    assert told.explained_share < 0.8
    assert told.causes == ()
    assert "not 80 %" in told.no_verdict


def test_input_and_network_are_named_where_no_rank_waits_for_another():
    """All wait alike: no rank is to blame."""

    def late(step, rank):
        return {"INPUT": 100_000}

    found = shown(steps(60, 3, late=late, exchange=60_000)).diagnose()

    assert names(found) == [(Cause.INPUT, None), (Cause.NETWORK, None)]
    assert found.waiting_share < 0.03


@pytest.mark.parametrize(("exchange", "said"), [(10_000, []), (20_000, [(Cause.NETWORK, None)])])
def test_an_exchange_that_takes_its_usual_part_is_no_cause(exchange, said):
    """As gloo does on healthy links: of steps of 0.1 s, 10 ms are, and 20 ms are not."""
    assert names(shown(steps(60, 3, exchange=exchange)).diagnose()) == said


@pytest.mark.parametrize(("exchange", "first"), [(60_000, 1), (140_000, None)])
def test_a_rank_at_fault_comes_before_an_exchange_that_names_no_link(exchange, first):
    """Which takes its time beside any cause; of one far larger, it comes after."""

    def late(step, rank):
        return {"FORWARD": 60_000 * (rank == 1)}

    found = shown(steps(60, 3, late=late, exchange=exchange)).diagnose()

    assert found.ranks[0] == (-1 if first is None else first)
    assert set(found.ranks) == {1, -1}


def grown(found, by_us, *, rows=slice(30, None)):
    """Have the exchange of later steps take longer, on all ranks."""
    for step in found[rows]:
        for row in step:
            row[Phase.REDUCTION] += by_us
    return found


def test_of_an_exchange_of_less_than_a_millisecond_nothing_is_said_to_have_grown():
    """It would read "0 ms a step in place of 0 ms"."""
    longer = grown(steps(60, 3, exchange=3_000), 9_000)
    short = [[[us // 40 for us in row] for row in rows] for rows in longer]
    found = shown(short).diagnose()

    assert names(found) == [(Cause.NETWORK, None)]
    assert "longer" not in found.evidence[0]


def test_an_exchange_that_became_longer_is_named_sooner():
    """By 9 ms in the second half of steps of 0.1 s: a fixed exchange has to take 12 ms."""
    found = shown(grown(steps(60, 3, exchange=3_000), 9_000)).diagnose()

    assert names(found) == [(Cause.NETWORK, None)]
    assert "it has become longer, 12 ms a step in place of 3" in found.evidence[0]
    for other in (
        grown(steps(60, 3, exchange=3_000), 5_000),
        grown(steps(60, 3, exchange=12_000), -9_000),  # it became shorter
        grown(steps(60, 3, exchange=3_000), 25_000, rows=slice(40, 43)),  # for three steps
    ):
        assert names(shown(other).diagnose()) == []


@pytest.mark.parametrize(
    ("first", "cause"), [(0.6, Cause.SLOW_WORKER), (0.0, Cause.THROTTLING)], ids=["slow", "fast"]
)
def test_a_rank_that_was_slow_from_the_start_is_not_throttled(first, cause):
    """Though it gets slower still, as where its machine has less and less time left."""

    def late(step, rank):
        part = (first + (1 - first) * step / 60) if rank == 1 else 0.0
        return {"FORWARD": 30_000 * part, "BACKWARD": 60_000 * part}

    assert names(shown(steps(60, 3, late=late)).diagnose()) == [(cause, 1)]


def test_a_quota_and_the_want_of_a_core_are_told_apart_by_the_machine():
    """Both look like a slow worker; with equal times the one or the other is named."""
    slow = steps(
        100, 2, late=lambda step, rank: {"FORWARD": 30_000 * rank, "BACKWARD": 60_000 * rank}
    )
    for field, cause, word in (
        ("throttled_s", Cause.SLOW_WORKER, "quota"),
        ("run_delay_s", Cause.CONTENTION, "core"),
        ("major_faults", Cause.MEMORY, "disk"),
    ):
        diagnoser = shown(slow)
        amount = 500 if field == "major_faults" else 0.5
        for second in range(10):
            diagnoser.add_host(0, HostClues(second, 1.0))
            diagnoser.add_host(1, HostClues(second, 1.0, **{field: amount}))
        found = diagnoser.diagnose()

        assert names(found) == [(cause, 1)]
        assert word in found.evidence[0]

    several = shown(slow)
    for second in range(10):  # eight threads, of which two are held back at a time
        several.add_host(1, HostClues(second, 1.0, cpu_s=6.0, throttled_s=2.0))
    assert "holds it back for 25 % of the time" in several.diagnose().evidence[0]


def test_sizes_that_differ_on_purpose_are_no_lengths():
    """A rank half as fast has half the samples, and that changes with the plan."""
    sizes = [(40, 20) if step % 20 < 10 else (36, 18) for step in range(100)]

    def late(step, rank):
        per_sample = (1_500, 3_000)[rank]
        return {"FORWARD": sizes[step][rank] * per_sample, "INPUT": 50_000 * (rank == 0)}

    clues = [[StepClues(size=size) for size in both] for both in sizes]
    found = shown(steps(100, 2, late=late), clues=clues.__getitem__).diagnose()

    assert names(found) == [(Cause.INPUT, 0)]


def test_the_remedy_for_lengths_is_the_argument_that_the_balancer_has():
    """The one that plans by cost; ``prepare`` has none."""
    sizes = np.random.default_rng(0).integers(10, 100, (100, 2)).tolist()
    late = shown(
        steps(100, 2, late=lambda step, rank: {"FORWARD": 1_000 * sizes[step][rank]}),
        clues=[[StepClues(size=size) for size in both] for both in sizes].__getitem__,
    )
    found = late.diagnose()

    assert names(found)[0][0] is Cause.LENGTHS
    assert "`Balancer(cost=...)`" in found.remedy[0]


def test_how_often_it_is_asked_changes_nothing():
    """Steps are summed up in pieces; of the sums nothing is lost."""
    slow = steps(90, 3, late=lambda step, rank: {"INPUT": 30_000 * (rank == 2)})
    once, often = shown(slow).diagnose(), shown(slow, ask_every=7).diagnose()

    assert names(once) == names(often) == [(Cause.INPUT, 2)]
    assert once.num_steps == often.num_steps == 87
    assert once.lost_share[0] == pytest.approx(often.lost_share[0], rel=1e-9)


def test_ranks_by_other_numbers_have_the_same_causes():
    """A rank is a name."""

    def late(step, rank):
        return {"INPUT": 40_000} if rank == 0 else {"REST": 30_000} if rank == 1 else {}

    found = steps(60, 4, late=late)
    turned = [rows[::-1] for rows in found]

    told, other = shown(found).diagnose(), shown(turned).diagnose()
    assert names(other) == [(cause, 3 - rank) for cause, rank in names(told)]
    assert len(names(told)) == 2


def test_what_is_over_leaves_the_window_and_stays_in_the_run():
    """A rank was slow in the first third of the run, half a minute ago."""
    found = steps(900, 2, late=lambda step, rank: {"INPUT": 50_000 * rank * (step < 300)})
    diagnoser = shown(found, ask_every=10, window_s=30.0)

    assert diagnoser.diagnose().causes == ()
    assert names(diagnoser.diagnose(whole_run=True)) == [(Cause.INPUT, 1)]


def test_a_step_that_is_missing_is_left_out():
    """What leads to the step after it is not known; two steps in a row are enough to begin."""
    found = steps(60, 2, late=lambda step, rank: {"REST": 30_000 * rank})
    diagnoser = Diagnoser(2)
    assert "no two steps" in diagnoser.diagnose().no_verdict
    for step, spent_us in enumerate(found):
        if step % 10 != 9:
            diagnoser.add(step, spent_us)
    told = diagnoser.diagnose()

    assert told.num_steps == 6 * 8 - 2
    assert names(told) == [(Cause.LOGGING, 1)]


@pytest.mark.parametrize(
    ("late", "exchange", "cause"),
    [
        ({}, 8_000, None),
        ({"FORWARD": 3_000, "BACKWARD": 6_000}, 8_000, (Cause.SLOW_WORKER, 1)),
        ({"CHECKPOINT": 15_000}, 2_000, (Cause.CHECKPOINT, 1)),
    ],
)
def test_short_steps_may_be_summed_from_some_time_on(late, exchange, cause):
    """Nothing becomes longer by it, and what a step takes is still a step's."""
    found = steps(600, 4, late=lambda step, rank: late if rank == 1 else {}, exchange=exchange)
    diagnoser = Diagnoser(4)
    for step, spent_us in enumerate(found[:200]):
        diagnoser.add(step, spent_us)
    single = diagnoser.diagnose()
    for step in range(203, 600, 4):
        summed = np.sum(found[step - 3 : step + 1], axis=0).tolist()
        diagnoser.add(step, summed, num_steps=4)
    told = diagnoser.diagnose(whole_run=True)

    assert names(told) == names(single) == ([cause] if cause else [])
    assert told.num_steps == 600 - 3
    assert told.step_s == pytest.approx(single.step_s, rel=0.01)
    assert told.waiting_share == pytest.approx(single.waiting_share, abs=0.01)


def test_memory_stays_the_same_however_long_the_run():
    """By what a copy of it takes, after 3,000 steps and after 12,000."""
    found = steps(100, 2)
    diagnoser, sizes = Diagnoser(2, window_s=1.0), []
    for step in range(12_000):
        diagnoser.add(step, found[step % 100])
        if step in (2_999, 11_999):
            sizes.append(len(pickle.dumps(diagnoser)))

    assert sizes[1] <= 1.3 * sizes[0]


TIMES = st.lists(st.integers(0, 10**9), min_size=len(Phase), max_size=len(Phase))
CLUES = st.builds(StepClues, *[st.integers(0, 10**9)] * 3)


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_whatever_is_measured_shares_stay_shares(world_size, num_steps, data):
    """No division by zero, no share above all, and an event that can be written."""
    diagnoser = Diagnoser(world_size)
    for step in range(num_steps):
        spent_us = [data.draw(TIMES) for _ in range(world_size)]
        diagnoser.add(step, spent_us, [data.draw(CLUES) for _ in range(world_size)])
    found = diagnoser.diagnose(whole_run=data.draw(st.booleans()))
    shares = [found.waiting_share, found.explained_share, *found.lost_share]

    assert all(0.0 <= share <= 1.0 for share in shares)
    assert bool(found.causes) != bool(found.no_verdict)
    assert to_record(found)["step"] == num_steps - 1


def test_a_cause_without_a_rank_has_none_in_the_event():
    """-1 stands for it, as files and sinks want it."""
    late = shown(steps(60, 2, late=lambda step, rank: {"INPUT": 50_000 * rank}, exchange=40_000))
    event = late.diagnose()

    assert (event.causes, event.ranks) == (("input", "network"), (1, -1))
    assert (event.step, event.num_steps, event.no_verdict) == (59, 57, "")
