"""What watched steps would take otherwise, against times that are known."""

import numpy as np
import pytest

from evenstep import AffineTime, Cluster, allocate
from evenstep._diagnosis import Phase
from evenstep.watch._counterfactuals import WatchedSteps, foresee

NUM_STEPS, NUM_SAMPLES = 105, 16
UNIT_S = 1e-4  # of a token
OTHER_S, EXCHANGE_S = 0.002, 0.01


def lengths(seed=0, num_ranks=4):
    """Tokens of the samples of every rank and step."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.gamma(1.5, 100, (NUM_STEPS, num_ranks, NUM_SAMPLES)), 1, 2000).round()


def watched(compute_s, size=0, num_samples=NUM_SAMPLES, **more):
    """Steps that end with the last rank, and an exchange."""
    shape = compute_s.shape
    return WatchedSteps(
        wall_s=(compute_s + OTHER_S).max(axis=1) + EXCHANGE_S,
        compute_s=compute_s,
        other_s=np.full(shape, OTHER_S),
        num_samples=np.broadcast_to(num_samples, shape),
        size=np.broadcast_to(size, shape),
        **more,
    )


def alike(times_s):
    """Steps in which every rank takes its time."""
    return np.broadcast_to(np.array(times_s, float), (NUM_STEPS, len(times_s)))


def steps_over(seen, compute_s):
    """What steps took, over what they would with these times."""
    would_s = np.broadcast_to(compute_s, seen.wall_s.shape) + OTHER_S + EXCHANGE_S
    return seen.wall_s[5:].sum() / would_s[5:].sum()


@pytest.mark.parametrize("fixed", [0, 0.3, 0.45])
def test_by_speed_the_fixed_part_need_not_be_known(fixed):
    """Where slow ranks are slower in all they do, any share of it leads to one answer."""
    slow, total = 0.4 / np.array([1, 1, 2, 4]), 4000
    seen = watched(alike(slow), num_samples=1000)
    times = AffineTime(fixed * slow, (1 - fixed) * slow / 1000)
    best = times.seconds(allocate(times, Cluster(4, total))).max()

    assert foresee(seen).by_speed.factor == pytest.approx(steps_over(seen, best), rel=0.01)


def test_a_delay_that_no_split_shortens_is_in_the_range():
    """Constant batches do not show what a step costs before its first sample: both ends count."""
    seen = watched(alike([0.1, 0.1, 0.1, 0.2]), num_samples=1000)
    truth = steps_over(seen, 0.125)  # 0.1 s of a delay, and a quarter of what the others have to do

    told = foresee(seen).by_speed

    assert told.least == pytest.approx(truth, rel=0.01)
    assert told.factor > 1.05 * told.least
    assert "too much alike" in told.reason


def test_a_rank_slow_in_forward_and_backward_leaves_no_range():
    """One factor on both is a slow device, not a delay."""
    spent = np.zeros((NUM_STEPS, 2, len(Phase)))
    spent[:, 0, [Phase.FORWARD, Phase.BACKWARD, Phase.REDUCTION]] = 30_000, 60_000, 1000
    spent[:, 1, [Phase.FORWARD, Phase.BACKWARD, Phase.REDUCTION]] = 10_000, 20_000, 61_000
    slow = foresee(WatchedSteps.of(spent)).by_speed
    spent[:, 0, [Phase.FORWARD, Phase.BACKWARD]] = 70_000, 20_000
    delayed = foresee(WatchedSteps.of(spent)).by_speed

    assert slow.least == slow.factor == pytest.approx(91 / 46.4, rel=0.01)
    assert delayed.least < 0.95 * delayed.factor


def test_sizes_that_differ_tell_a_delay_from_a_slow_device():
    """With unequal lengths the fixed part is measured, and the range is gone."""
    size = lengths().sum(axis=2)
    delayed = UNIT_S * size + [0.2, 0, 0, 0]
    seen = watched(delayed, size)
    level = UNIT_S * size.mean(axis=1) + 0.05

    told = foresee(seen).by_both

    assert told.factor == pytest.approx(steps_over(seen, level), rel=0.01)
    assert told.reason == ""


@pytest.mark.parametrize("speeds", [(1, 1, 1, 1), (1, 1, 2, 4)])
@pytest.mark.parametrize("curve", [0, 1 / 200])
@pytest.mark.parametrize("kind", ["packed", "rows", "padded"])
def test_by_both_all_end_together_in_each_step(speeds, curve, kind):
    """Packed or padded, linear or with attention: within 3 % of what costs and speeds say."""
    tokens, speed = lengths(), np.array(speeds)
    if kind == "padded":
        tokens = np.broadcast_to(tokens.max(axis=2, keepdims=True), tokens.shape)
    cost = (tokens + curve * tokens**2).sum(axis=2)
    rng = np.random.default_rng(1)
    took, size = (0.005 + UNIT_S * cost) / speed * rng.normal(1, 0.01, cost.shape), tokens.sum(2)
    seen = watched(took, size, num_samples=size if kind == "packed" else NUM_SAMPLES)
    level = (4 * 0.005 + UNIT_S * cost.sum(axis=1)) / speed.sum()

    assert foresee(seen).by_both.factor == pytest.approx(steps_over(seen, level), rel=0.03)


def test_a_short_last_batch_is_no_length():
    """Samples of one size stay so where an epoch ends; and it shows what a fixed delay is."""
    num = np.full((NUM_STEPS, 4), 160)
    num[20::21] = 40
    seen = watched(0.001 * num + [0.1, 0, 0, 0], 100 * num, num_samples=num)

    told = foresee(seen)

    assert told.by_length.reason == "all batches have one size; if padded, try `cost`"
    assert told.by_speed.least == told.by_speed.factor
    assert told.by_speed.factor == pytest.approx(
        steps_over(seen, 0.001 * num[:, 0] + 0.1 / 4), rel=0.03
    )


def test_by_length_the_slowest_rank_has_its_share_of_the_tokens():
    """Speeds stay as they are: each rank has a quarter."""
    size, speed = lengths().sum(axis=2), np.array([1, 1, 2, 4])
    seen = watched(UNIT_S * size / speed, size)

    assert foresee(seen).by_length.factor == pytest.approx(
        steps_over(seen, UNIT_S * size.mean(axis=1)), rel=0.01
    )


def test_by_speed_lengths_still_rule_single_steps():
    """Sizes by speed leave the draw of lengths to chance, as another draw shows."""
    tokens, speed = lengths(num_ranks=5), np.array([1, 1, 1, 1, 12])
    seen = watched(UNIT_S * tokens.sum(axis=2) / speed, tokens.sum(axis=2))
    drawn = np.random.default_rng(2).choice(tokens.ravel(), (20_000, 80))
    took = np.add.reduceat(drawn, [0, 5, 10, 15, 20], axis=1)  # by speed, in integers
    slowest = (UNIT_S * took / speed).max(axis=1).mean()

    assert foresee(seen).by_speed.factor == pytest.approx(steps_over(seen, slowest), rel=0.03)


def test_without_the_slowest_the_others_share_its_samples():
    """Three ranks take a third more each."""
    seen = watched(alike([0.3, 0.09, 0.09, 0.09]))

    told = foresee(seen)

    assert told.slowest == 0
    assert told.without_slowest.factor == pytest.approx(steps_over(seen, 0.12), rel=0.01)


def test_what_no_split_changes_stays():
    """Where nearly all of a step is the exchange, nearly nothing is promised."""
    seen = watched(alike([0.001, 0.0002]))

    assert 0.9 < foresee(seen).by_speed.factor < 1.05


def test_equal_workers_gain_nothing_from_noise():
    """Hiccups befall ranks with any share: none is promised to go away."""
    noise = np.random.default_rng(3).gamma(40, 1 / 40, (NUM_STEPS, 4))
    told = foresee(watched(0.1 * noise))

    assert 0.95 < told.by_speed.factor < 1.03


def test_a_rank_that_gets_slower_is_followed():
    """The gain is that of all times along the way, not of their mean."""
    slow = np.linspace(1, 4, NUM_STEPS)
    times = np.stack([0.05 * slow, np.full(NUM_STEPS, 0.05)], axis=1)
    seen = watched(times, num_samples=1000)

    assert foresee(seen).by_speed.factor == pytest.approx(
        steps_over(seen, 2 / (1 / times).sum(axis=1)), rel=0.12
    )


def test_short_steps_that_come_several_in_a_row_are_divided():
    """A row of eight steps says the same as one of one."""
    spent = np.zeros((NUM_STEPS, 2, len(Phase)))
    spent[:, 0, [Phase.FORWARD, Phase.BACKWARD]] = 3000, 6000
    spent[:, 1, [Phase.FORWARD, Phase.BACKWARD, Phase.REDUCTION]] = 1000, 2000, 6000

    one, eight = WatchedSteps.of(spent), WatchedSteps.of(8 * spent, num_steps=8)

    assert foresee(one) == foresee(eight)


def test_what_cannot_be_told_has_a_reason():
    """Few steps, one rank, unknown sizes, equal ones."""
    few = foresee(watched(alike([0.1, 0.2])).since(90))
    alone = foresee(watched(alike([0.1])))
    unknown = foresee(watched(alike([0.1, 0.2])))
    equal = foresee(watched(alike([0.1, 0.2]), size=64))

    assert few.by_speed.factor is None
    assert "15 steps" in few.by_speed.reason
    assert alone.by_speed.reason == "there is one rank"
    assert unknown.by_length.factor is None
    assert "not known" in unknown.by_length.reason
    assert (equal.by_length.factor, equal.by_length.reason) == (
        1,
        "all batches have one size; if padded, try `cost`",
    )
    assert few.best == 1
