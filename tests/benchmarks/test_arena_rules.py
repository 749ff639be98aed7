"""What the arena's emulation and its comparators decide, without a process."""

from threading import Thread

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from benchmarks._stealing import Stealing
from benchmarks.arena._devices import Clock, Device
from benchmarks.arena._figures import readings_gain
from benchmarks.arena._papers import SETUPS, TRACES, by_cores, exchange_for, fitted_exchange_s
from benchmarks.arena._setups import ArenaSetUp
from benchmarks.arena._traces import Trace, drawn, periodic, recorded, static
from benchmarks.arena.contestants import FirstFew, Stale, contestants
from benchmarks.arena.contestants._foreman import Foreman
from benchmarks.arena.contestants._push_rules import Pushes


class StoppedClock(Clock):
    """Moves only as a device waits."""

    now_s = 0.0

    def wait_until(self, end_s):
        """Be there."""
        self.now_s = max(self.now_s, end_s)


ranks = st.lists(st.integers(0, 2), max_size=60)


def pushed(rule, order):
    """Verdicts on gradients pushed in this order, as far as their workers may push at all."""
    pushes, found = Pushes.start(3), []
    for rank in order:
        if rank not in pushes.waiting:
            verdict = rule.pushed(pushes, rank)
            pushes = verdict.pushes
            found.append((rank, verdict))
    return found


@given(ranks, st.integers(0, 4))
def test_no_worker_is_further_ahead_than_the_bound(order, bound):
    """A worker that is answered is at most ``bound`` clocks ahead of the slowest; all are used."""
    for _, verdict in pushed(Stale(bound), order):
        clock = verdict.pushes.clock

        assert verdict.uses
        assert verdict.updates
        assert all(clock[rank] - min(clock) <= bound for rank in verdict.answers)
        assert all(clock[rank] - min(clock) > bound for rank in verdict.pushes.waiting)


@given(ranks)
def test_asp_answers_at_once(order):
    """The worker that pushed goes on, alone."""
    assert all(verdict.answers == (rank,) for rank, verdict in pushed(Stale(), order))


@given(ranks)
def test_soft_groups_hold_late_gradients_too(order):
    """Every second gradient updates the model, and none is lost."""
    found = [verdict for _, verdict in pushed(FirstFew(2), order)]

    assert all(verdict.uses for verdict in found)
    assert [verdict.updates for verdict in found] == [k % 2 == 1 for k in range(len(found))]


def test_a_backup_worker_drops_what_is_late():
    """Ranks 0 and 1 make an update; rank 2's gradient of the old model is dropped, its next not."""
    found = [verdict for _, verdict in pushed(FirstFew(2, drops_stale=True), [0, 1, 2, 2, 0])]

    assert [verdict.uses for verdict in found] == [True, True, False, True, True]
    assert [verdict.updates for verdict in found] == [False, True, False, False, True]
    assert [verdict.answers for verdict in found] == [(), (0, 1), (2,), (), (2, 0)]


def test_gradients_weigh_as_much_as_in_plain_training():
    """A push of one of four workers moves the model a quarter as far as all of them do."""
    assert Stale(3).weight(4) == Stale().weight(4) == 0.25
    assert FirstFew(2).weight(4) == 0.5


def test_work_lasts_longer_while_a_worker_is_slowed():
    """1 s alone, 2 s at half speed from second 1 to 3, and from 4 on as from 0 on."""
    trace = Trace(np.array([1.0, 2.0, 1.0]), np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 1.0]]))

    assert trace.end_s(0, 0.5, 1.0) == 1.5
    assert trace.end_s(1, 0.5, 1.0) == 2.0
    assert trace.end_s(1, 0.5, 3.0) == 4.5
    assert trace.end_s(1, 4.5, 1.0) == 6.0
    assert trace.at(5.5).tolist() == [1.0, 2.0]


@given(st.floats(0, 500), st.floats(1e-6, 60))
def test_a_static_worker_is_as_fast_as_alone(begin_s, alone_s):
    """Whenever it begins."""
    assert static(2).end_s(1, begin_s, alone_s) == pytest.approx(begin_s + alone_s)


def test_workers_are_slowed_in_turn():
    """One after the other, and round again."""
    trace = periodic(3, period_s=2.0, slowdown=3.0)

    assert [trace.at(now_s).tolist() for now_s in (1.0, 5.0, 7.0)] == [
        [3.0, 1.0, 1.0],
        [1.0, 1.0, 3.0],
        [3.0, 1.0, 1.0],
    ]


@given(st.integers(0, 100))
def test_drawn_contention_comes_and_goes(seed):
    """Within its bounds, on every worker, for as long as asked."""
    trace = drawn(4, seed=seed, length_s=30.0, stay_s=(2.0, 5.0), slowdown=(1.5, 3.0))

    assert trace.period_s.sum() == pytest.approx(30.0)
    assert ((trace.slowdown == 1) | ((trace.slowdown >= 1.5) & (trace.slowdown <= 3))).all()
    assert (trace.slowdown > 1).any(axis=0).all()
    assert (trace.slowdown == 1).any(axis=0).all()


def test_the_exchange_is_fitted_to_the_papers_saving():
    """With it, the paper's own times at both splits give 64.57 % less."""
    assert 1 - (0.1049 + fitted_exchange_s()) / (0.3929 + fitted_exchange_s()) == pytest.approx(
        0.6457
    )


@pytest.mark.parametrize(
    ("gain", "equal_s", "balanced_s"), [(4.0, 1.3, 0.2), (2.4, 1.0, 6 / 39), (1.15, 1.0, 6 / 39)]
)
def test_an_exchange_explains_a_gain_below_the_bound(gain, equal_s, balanced_s):
    """With it, balancing gains just that; a gain above the bound would need one below zero."""
    exchange_s = exchange_for(gain, equal_s, balanced_s)

    assert exchange_s > 0
    assert (equal_s + exchange_s) / (balanced_s + exchange_s) == pytest.approx(gain)
    assert exchange_for(1.01 * equal_s / balanced_s, equal_s, balanced_s) < 0


@pytest.mark.parametrize("name", SETUPS)
def test_knowing_the_speeds_is_the_bound(name):
    """It gains over equal sizes, and no more than a step takes at least."""
    setup = SETUPS[name]
    best_s = setup.mean_step_s(setup.duration_s, equal=False)

    assert setup.step_s(setup.best(np.ones(setup.world_size))) <= best_s * (1 + 1e-9)
    assert best_s < setup.mean_step_s(setup.duration_s, equal=True)
    assert {"ddp", "auto", "hybrid", setup.rule, *setup.rivals} <= contestants(setup).keys()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bound"), [("lb-bsp-gpu", 1.54), ("dynamic-10-fold", 4.0)])
def test_what_a_paper_leaves_open_is_chosen_to_allow_its_figure(name, bound):
    """Up to one sample."""
    setup = SETUPS[f"{name}-static"]
    found = setup.mean_step_s(1e3, equal=True) / setup.mean_step_s(1e3, equal=False)

    assert found == pytest.approx(bound, rel=0.01)


def test_readings_explain_one_of_two_loads():
    """As chosen beforehand: quotas that are told add 0.1 to the R^2, waits of the last step none.

    The workers and what slows them are the same.
    """
    told, not_told = SETUPS["narx-quotas"], SETUPS["narx-neighbours"]

    assert readings_gain(told) >= 0.1
    assert readings_gain(not_told) < 0.02
    np.testing.assert_array_equal(told.trace.slowdown, not_told.trace.slowdown)


def test_a_device_that_is_not_full_takes_as_long_for_fewer_samples():
    """Of what comes after other samples of the step, only what is past the flat part costs."""
    setup, clock = SETUPS["lb-bsp-gpu-static"], StoppedClock()
    device = Device(setup, 2, clock)
    flat_s, slope_s = float(setup.times.flat_s[2]), float(setup.times.slope_s[2])
    took_s = []
    for num_samples, after in ((8, 0), (32, 0), (8, 8), (10, 30)):
        began_s = clock.now_s
        device.compute(num_samples, began_s, after=after)
        took_s.append(clock.now_s - began_s)

    assert took_s == pytest.approx([flat_s, flat_s, 0.0, 8 * slope_s])


@pytest.mark.parametrize(("tells", "share"), [(True, 1 / 3), (False, 0.5)])
def test_a_reader_is_told_a_quota_at_once_and_waits_afterwards(tells, share):
    """Alone for 1 s, then at a third: 1 s of work from 0.5 s on takes 2 s."""
    trace = Trace(np.array([1.0, 9.0]), np.array([[1.0], [3.0]]))
    times = by_cores(1, equal_s=1.0)
    setup, clock = (
        ArenaSetUp("one", "auto", times, trace, 0.0, 128, tells_quota=tells),
        StoppedClock(),
    )
    clock.now_s = 0.5
    device = Device(setup, 0, clock)
    device.compute(128, 0.5)

    assert device.read()[0] == pytest.approx(share)


def test_a_recording_slows_all_workers_from_its_parts():
    """Two recorded workers are four, the later half of the steps beside the earlier one."""
    trace = recorded(TRACES / "neighbours.csv", world_size=4, period_s=0.5)

    assert trace.slowdown.shape == (200, 4)
    assert trace.slowdown.min() == 1.0
    assert trace.slowdown.max() > 2
    assert trace.changes
    assert not Trace(np.ones(2), np.array([[1.0, 2.0], [1.0, 2.0]])).changes


def test_every_slot_of_a_step_is_handed_out_once():
    """Three ranks ask until they get nothing, step after step; the slowest hands work over."""
    foreman, found = Foreman(Stealing(), np.full(3, 40)), {0: [], 1: [], 2: []}

    def work(rank):
        for step in range(5):
            while (chunk := foreman.ask(rank, (9.0, 9.0, 1.0)[rank])) is not None:
                found[rank] += [(step, slot) for slot in range(chunk.start, chunk.stop)]

    threads = [Thread(target=work, args=(rank,)) for rank in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    done = sorted(found[0] + found[1] + found[2])
    assert done == [(step, slot) for step in range(5) for slot in range(120)]
