"""What the filter learns from steps, what it does not fall for, and what it holds back."""

import numpy as np
import pytest

from evenstep.prediction._affine_filter import LASTING_S, NAMES, AffineFilter, judge, no_jumps_yet

INTERCEPT_S = np.array([0.010, 0.002, 0.030])
SLOPE_S = np.array([0.001, 0.002, 0.004])


def seconds(sizes):
    return INTERCEPT_S + SLOPE_S * sizes


def learn(steps, state=None):
    """Return the state after ``steps``, pairs of sizes and seconds."""
    filter = AffineFilter()
    state = filter.init(3) if state is None else state
    for sizes, compute_s in steps:
        state = filter.update(state, np.asarray(sizes), np.asarray(compute_s, float))
    return state


def predicted(state, sizes):
    return AffineFilter().times(state).seconds(np.asarray(sizes))


EQUAL = np.array([30, 30, 30])
OTHER = np.array([50, 28, 12])
SETTLED = [(EQUAL, seconds(EQUAL)), *[(OTHER, seconds(OTHER))] * 30]


def test_nothing_is_known_until_all_were_measured():
    """None before the first step, and as long as a worker had no samples."""
    filter = AffineFilter()

    assert filter.times(filter.init(3)) is None
    assert filter.times(learn([([5, 5, 0], [1, 1, 0])])) is None
    assert filter.uncertainty(learn([([5, 5, 0], [1, 1, 0])]))[2] == 1.0
    assert filter.times(learn([([5, 5, 0], [1, 1, 0]), ([0, 0, 5], [0, 0, 1])])) is not None


def test_one_size_reads_as_proportional():
    """No fixed cost is assumed before a second size shows one."""
    times = AffineFilter().times(learn([(EQUAL, seconds(EQUAL))]))

    assert (times.intercept_s == 0).all()
    np.testing.assert_allclose(times.slope_s, seconds(EQUAL) / EQUAL)


def test_two_sizes_settle_the_fixed_cost():
    """Both costs to a few percent where the size changed by half, without noise."""
    state = learn([(EQUAL, seconds(EQUAL)), ([60, 15, 15], seconds([60, 15, 15]))])

    np.testing.assert_allclose(predicted(state, [90, 8, 8]), seconds([90, 8, 8]), rtol=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_out(seed):
    """With 3 % on every step, the estimate after a hundred is within 2 %."""
    noise = np.exp(0.03 * np.random.default_rng(seed).standard_normal((100, 3)))
    state = learn([(EQUAL, seconds(EQUAL) * noise[0])])
    state = learn([(OTHER, seconds(OTHER) * row) for row in noise[1:]], state=state)

    np.testing.assert_allclose(predicted(state, OTHER), seconds(OTHER), rtol=0.02)
    assert (AffineFilter().uncertainty(state) < 0.02).all()


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_one_odd_step_leaves_no_trace(factor):
    """Held back, and forgotten when the next is as before."""
    state = learn(SETTLED)
    odd = learn([(OTHER, seconds(OTHER) * [1, factor, 1])], state=state)
    after = learn([(OTHER, seconds(OTHER))], state=odd)

    np.testing.assert_allclose(predicted(odd, OTHER), predicted(state, OTHER), rtol=1e-6)
    np.testing.assert_allclose(predicted(after, OTHER), predicted(state, OTHER), rtol=1e-3)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_two_odd_steps_are_a_lasting_change(factor):
    """The second in the same direction is followed at once."""
    changed = seconds(OTHER) * [1, factor, 1]
    late = 1 + (2 * changed[1] < LASTING_S)  # short steps take a few more to make up the time
    state = learn([(OTHER, changed)] * 2 * late, state=learn(SETTLED))

    np.testing.assert_allclose(predicted(state, OTHER), changed, rtol=0.02)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_the_way_back_restores_what_was_known(factor):
    """After a spell at another speed, fixed cost and slope are the old ones, not new guesses."""
    settled = learn(SETTLED)
    spell = learn([(OTHER, seconds(OTHER) * [1, factor, 1])] * 12, state=settled)
    back = learn([(OTHER, seconds(OTHER))] * 4, state=spell)

    for other_size in (OTHER, OTHER // 2, 2 * OTHER):
        np.testing.assert_allclose(predicted(back, other_size), seconds(other_size), rtol=0.02)


def test_two_odd_steps_in_opposite_directions_are_two_hiccups():
    """Neither is followed."""
    state = learn(SETTLED)
    odd = [(OTHER, seconds(OTHER) * [1, factor, 1]) for factor in (3.0, 0.3)]

    np.testing.assert_allclose(predicted(learn(odd, state=state), OTHER), seconds(OTHER), rtol=0.01)


def test_a_worker_without_samples_keeps_its_estimate():
    """Whatever its time reads."""
    state = learn(SETTLED)
    idle = learn([([60, 30, 0], [*seconds(np.array([60, 30, 1]))[:2], np.nan])] * 5, state=state)

    np.testing.assert_allclose(predicted(idle, OTHER)[2], seconds(OTHER)[2], rtol=0.01)
    assert idle["num_steps"].tolist() == [36, 36, 31]


def test_a_drift_is_followed():
    """3 % slower with every step: never more than 8 % behind."""
    state, behind = learn(SETTLED), []
    for step in range(60):
        now = seconds(OTHER) * 1.03**step
        behind.append(abs(predicted(state, OTHER) / now - 1).max())
        state = learn([(OTHER, now)], state=state)

    assert max(behind[10:]) <= 0.08


def test_the_state_given_is_left_as_it_is():
    """Two updates from one state give the same."""
    state = learn(SETTLED)
    one = learn([(EQUAL, seconds(EQUAL))], state=state)
    again = learn([(EQUAL, seconds(EQUAL))], state=state)

    assert one["lines"].tolist() == again["lines"].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_workers_are_followed_each_by_itself(seed):
    """What one worker does, be it new, idle or jumping, leaves the estimates of others alone."""
    rng, filter = np.random.default_rng(seed), AffineFilter()
    sizes = rng.integers(20, 60, (60, 3)) * (rng.random((60, 3)) < 0.9)
    usual = (INTERCEPT_S + SLOPE_S * sizes) * np.exp(0.02 * rng.standard_normal((60, 3)))
    odd_sizes, odd = sizes.copy(), usual.copy()
    odd_sizes[:, 2] = rng.integers(0, 4, 60)
    odd[:, 2] *= rng.lognormal(0, 1, 60)

    state = other = filter.init(3)
    for step in range(60):
        state = filter.update(state, sizes[step], usual[step])
        other = filter.update(other, odd_sizes[step], odd[step])

    for name, values in zip(NAMES, state["lines"], strict=True):
        assert (values[:, :2] == other["lines"][NAMES.index(name)][:, :2]).all(), name


@pytest.mark.parametrize("seed", range(20))
def test_any_times_at_all_give_possible_costs(seed):
    """Times without rhyme or reason: costs stay finite, fixed ones at least 0, others above."""
    rng = np.random.default_rng(seed)
    steps = [(rng.integers(0, 50, 3), rng.lognormal(-3, 3, 3)) for _ in range(200)]
    steps.insert(0, (EQUAL, seconds(EQUAL)))

    times = AffineFilter().times(learn(steps))

    assert np.isfinite(times.intercept_s).all()
    assert (times.intercept_s >= 0).all()
    assert (times.slope_s > 0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"drifts": ()},
        {"drifts": (0.0,)},
        {"drifts": (0.01, float("nan"))},
        {"drifts": (float("inf"),)},
        {"first_noise": float("inf")},
        {"doubt": float("inf")},
        {"first_noise": 0.0},
        {"doubt": -1.0},
        {"gate": float("nan")},
        {"least_jump": 0.0},
        {"memory": 1.0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(settings):
    """The message names class and argument."""
    with pytest.raises(ValueError, match=rf"`AffineFilter\({next(iter(settings))}=..."):
        AffineFilter(**settings)


def test_a_cost_per_sample_never_vanishes():
    """A thousand steps whose time does not depend on their size leave something to divide by."""
    draw = np.random.default_rng(0)
    steps = ((draw.integers(20, 80, 3), np.full(3, 0.1)) for _ in range(1000))

    times = AffineFilter().times(learn(steps))

    assert (times.slope_s * 50 >= 1e-5 * 0.1).all()


@pytest.mark.parametrize("noise_share", [0.2, 0.4])
def test_large_noise_is_known_after_twenty_steps(noise_share):
    """What looks like one jump after the other is noise, and the error is owned up to."""
    draw = np.random.default_rng(0)
    filter_, size = AffineFilter(), np.full(200, 32)
    state = filter_.init(200)
    for _ in range(21):
        state = filter_.update(state, size, 0.4 * np.exp(noise_share * draw.standard_normal(200)))

    errors = filter_.times(state).seconds(size) / 0.4 - 1
    assert np.median(filter_.noise(state)) == pytest.approx(noise_share, rel=0.3)
    assert np.median(abs(errors) / filter_.uncertainty(state)) < 3


ALL, NONE = np.ones(2, bool), np.zeros(2, bool)
LONG = np.ones(2)  # seconds: past any pause
HOLD, ACCEPT, MEMORY = range(3)


def after(*jumps, memory=None, seconds=1.0):
    """Return the last verdict on jumps of rank 0, in steps that took ``seconds``."""
    memory = no_jumps_yet(2) if memory is None else memory
    for jump in jumps:
        verdict = judge(np.array([jump, 0]), seconds * LONG, ran=ALL, young=NONE, memory=memory)
        memory = verdict[MEMORY]
    return verdict


def test_the_first_jump_is_held_back_and_the_second_followed():
    """In the same direction; the other worker is not concerned."""
    assert after(1)[HOLD].tolist() == [True, False]
    assert after(1, 1)[ACCEPT].tolist() == [True, False]
    assert after(1, -1)[HOLD].tolist() == [True, False]
    assert after(1, 0, 1)[HOLD].tolist() == [True, False]


def test_a_pause_over_several_short_steps_is_no_lasting_change():
    """Steps of 30 ms have to be off four times in a row, 0.1 s in all, before they are believed."""
    assert after(1, 1, 1, seconds=0.03)[HOLD].tolist() == [True, False]
    assert after(1, 1, 1, 1, seconds=0.03)[ACCEPT].tolist() == [True, False]
    assert after(1, 1, 0, 1, 1, seconds=0.03)[HOLD].tolist() == [True, False]


def test_a_worker_with_little_behind_it_is_followed():
    """Which of its two readings is the odd one cannot be told."""
    verdict = judge(
        np.array([1, 1]), LONG, ran=ALL, young=np.array([True, False]), memory=no_jumps_yet(2)
    )

    assert verdict[ACCEPT].tolist() == [True, False]
    assert verdict[HOLD].tolist() == [False, True]


def test_jumps_that_lasted_earn_trust_and_those_that_passed_lose_it():
    """After a lasting one the next is believed at once; after a few that passed, no more."""
    trusting = after(1, 1, 0, 0)
    believed = after(-1, memory=trusting[MEMORY])
    disappointed = after(*[1, -1, 0] * 5, memory=trusting[MEMORY])

    assert believed[ACCEPT].tolist() == [True, False]
    assert after(1, memory=disappointed[MEMORY])[HOLD].tolist() == [True, False]


def test_a_believed_jump_that_is_undone_is_undone_at_once():
    """The way back is followed too, whatever the trust."""
    believed = after(1, memory=after(1, 1, 0, 0)[MEMORY])

    assert after(-1, memory=believed[MEMORY])[ACCEPT].tolist() == [True, False]


def test_a_worker_that_did_not_run_keeps_its_open_jump():
    """It is judged by its own next step."""
    held = after(1)
    idle = judge(
        np.array([0, 0]), LONG, ran=np.array([False, True]), young=NONE, memory=held[MEMORY]
    )

    assert after(1, memory=idle[MEMORY])[ACCEPT].tolist() == [True, False]
