"""What went from rank to rank, and links told apart from what was achieved over them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.network import (
    Aggregation,
    Links,
    OptimalShares,
    SharePlanner,
    exchange_s,
    optimal_shares,
)
from evenstep.network._following._link_tracker import LinkTracker, ObservedExchange, Transfers
from evenstep.network._plans._optimum import equal_shares
from evenstep.network.sim._shared_links import play_exchange

from .networks import collocated, dedicated, errors, mbit


def slowest_s(transfers):
    """Seconds of the slowest rank, either way, by the summed rates of its transfers."""
    slowest = 0.0
    for num_bytes, seconds in (
        (transfers.num_bytes, transfers.seconds),
        (transfers.num_bytes.T, transfers.seconds.T),
    ):
        for row, taken in zip(num_bytes, seconds, strict=True):
            seen = row > 0
            if seen.any():
                slowest = max(slowest, row[seen].sum() / (row[seen] / taken[seen]).sum())
    return slowest


def drawn(seed, size=4):
    """Any transfers, some of them none."""
    random = np.random.default_rng(seed)
    num_bytes = random.uniform(1e3, 1e6, (size, size)) * (random.random((size, size)) < 0.7)
    np.fill_diagonal(num_bytes, 0.0)
    seconds = np.where(num_bytes > 0, random.uniform(0.01, 2.0, (size, size)), 0)
    return Transfers(num_bytes, seconds, np.zeros((2, size)))


@given(st.integers(0, 1000), st.floats(0.01, 10))
def test_the_slowest_rank_takes_as_long_as_the_exchange(seed, exchange_s):
    """All rates change by one factor, bytes stay, and once is enough."""
    before = drawn(seed)
    after = before.lasting(exchange_s)
    if not before.num_bytes.any():
        assert after is before
        return
    assert slowest_s(after) == pytest.approx(exchange_s)
    np.testing.assert_array_equal(after.num_bytes, before.num_bytes)
    seen = before.seconds > 0
    factors = after.seconds[seen] / before.seconds[seen]
    np.testing.assert_allclose(factors, factors[0])
    np.testing.assert_allclose(after.lasting(exchange_s).seconds, after.seconds)


def test_without_transfers_there_is_nothing_to_scale():
    """Gradients so small that one rank summed all of its own, say."""
    nothing = Transfers(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros((2, 2)))
    assert nothing.lasting(1.0) is nothing


def test_transfers_one_after_the_other_tell_the_same_as_all_at_once():
    """Each with the whole link for a third of the time, or with a third of it throughout."""
    num_bytes = 1e6 * (1 - np.eye(4))
    at_once, in_turn = (
        Transfers(num_bytes, np.where(num_bytes > 0, each_s, 0.0), np.zeros((2, 4))).lasting(3.0)
        for each_s in (3.0, 1.0)
    )
    np.testing.assert_allclose(in_turn.seconds, at_once.seconds)


def test_what_is_known_exactly_hardly_changes():
    """Links that are shared fairly, one of them slow: its transfers take the exchange's time."""
    aggregation = Aggregation(4, 8_000_000, num_chunks=64)
    links = Links(np.array([25e6, 25e6, 25e6, 6e6]))
    done = play_exchange(aggregation, links, np.full(4, 0.25))
    after = done.transfers.lasting(done.exchange_s)
    seen = after.seconds > 0
    np.testing.assert_allclose(after.seconds[seen], done.transfers.seconds[seen], rtol=0.02)


ROWS = [
    (0, 2, 600, 3.0),
    (1, 2, 600, 3.0),
    (2, 2, 1200, 4.0),  # 6 seconds of ways in 4 of the link
    (2, 0, 300, 1.0),
    (2, 1, 300, 2.0),
    (0, 0, 300, 1.0),
    (1, 1, 300, 2.0),
]


def test_a_rank_tells_for_how_long_its_link_was_in_use():
    """What it sent is taken to overlap as what came, and half to take as long: 6 s of ways in 4."""
    done = Transfers.from_rows(3, ROWS)
    overlapping_s, as_what_came_s = np.array([3, 3, 3 / 1.5]), np.array([2, 4, 2])

    assert done.num_bytes.trace() == done.seconds.trace() == 0
    assert done.busy_s[1].tolist() == [1, 2, 4]
    np.testing.assert_allclose(done.busy_s[0], np.sqrt(overlapping_s * as_what_came_s))
    np.testing.assert_allclose(done.carried(1)[0], [600, 600, 600] / done.busy_s[0])
    assert done.carried(1)[1].tolist() == [300, 150, 300]
    assert done.carried(601).tolist() == [[0, 0, 0], [0, 0, 300]]
    assert done.lasting(100.0).busy_s is done.busy_s


def test_nothing_is_made_up_where_nobody_tells():
    """Neither of a rank to which nothing came, nor of all of them."""
    silent = Transfers.from_rows(3, [row for row in ROWS if row[0] != row[1]])
    partly = Transfers.from_rows(3, [row for row in ROWS if row[:2] != (1, 1)])

    assert not silent.busy_s.any()
    assert not silent.carried(1).any()
    assert partly.carried(1)[:, 1].tolist() == [0, 0]
    assert (partly.carried(1)[:, 0] > 0).all()


@pytest.mark.parametrize("wrong", [np.nan, -1.0, np.inf])
def test_times_of_links_that_cannot_be_are_named(wrong):
    """By the rank whose link it is."""
    done = Transfers.from_rows(3, ROWS)
    assert done.problem() is None
    done.busy_s[1, 2] = wrong
    assert done.problem() == (2, f"links in use for [2.0, {wrong}] s")


def after(belief, aggregation, links, *, steps, shares=None, noise=0.0):
    """The belief after some exchanges, each with the best shares for what was believed before."""
    random = np.random.default_rng(7)
    for _ in range(steps):
        now = optimal_shares(aggregation, belief.links) if shares is None else shares
        done = play_exchange(aggregation, links, now, noise=noise, generator=random)
        belief = belief.update(done.transfers)
    return belief


def test_a_fast_rank_among_slow_ones_keeps_its_bandwidth():
    """It moves 40 of its 200 Mbit/s for as long as the others are slow, and stays at 200."""
    aggregation = collocated()
    links = mbit(200, 20, 20, 20)
    shares = equal_shares(aggregation)
    achieved = play_exchange(aggregation, links, shares).transfers
    carried = achieved.num_bytes[0].sum() / achieved.seconds[0].max()
    belief = after(LinkTracker.of(links), aggregation, links, steps=30, shares=shares)

    assert carried < 0.25 * links.up_bytes_per_s[0]
    assert abs(errors(belief.links, links)).max() < 0.05


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("case", "factor"),
    [
        ("like", 0.25),
        ("like", 0.5),
        ("unlike", 0.25),
        ("unlike", 0.5),
        ("unlike", 2),
        ("unlike", 4),
    ],
)
def test_the_rank_whose_link_changed_is_the_one_that_is_found(rank, factor, case):
    """Within 10 exchanges; what others were taken for changes so little that shares are best."""
    aggregation = collocated()
    rates = np.array([100.0, 100, 100, 100] if case == "like" else [155, 110, 80, 60])
    before = mbit(*rates)
    rates[rank] *= factor
    now = mbit(*rates)
    belief = after(LinkTracker.of(before), aggregation, now, steps=10)
    off = errors(belief.links, now)
    taken_s, best_s = (
        exchange_s(aggregation, now, shares=optimal_shares(aggregation, links))
        for links in (belief.links, now)
    )

    assert taken_s <= 1.06 * best_s
    if factor < 1:
        assert abs(off).max() < 0.12


def test_a_link_that_nobody_asks_more_of_shows_nothing_more():
    """Equal shares ask 100 of each: whoever has 200 by now has to be given more to show it."""
    aggregation, now = collocated(), mbit(200, 100, 100, 100)
    belief = after(LinkTracker.of(mbit(100, 100, 100, 100)), aggregation, now, steps=10)
    asked = np.array([0.34, 0.22, 0.22, 0.22])
    once = after(belief, aggregation, now, steps=1, shares=asked)

    assert belief.links.up_bytes_per_s[0] == pytest.approx(12.5e6, rel=0.01)
    assert once.links.up_bytes_per_s[0] > 1.03 * 12.5e6
    assert after(once, aggregation, now, steps=10).links.up_bytes_per_s[0] > 1.2 * 12.5e6


def test_a_slow_server_is_not_taken_for_slow_workers():
    """Nor a slow worker for slow servers: each slows one transfer of all the others'."""
    aggregation = dedicated()
    before = mbit(200, 200, 200, 200, 150, 150, 100, 100)
    for rank in (1, 6):
        rates = np.array([200.0, 200, 200, 200, 150, 150, 100, 100])
        rates[rank] = 40
        belief = after(LinkTracker.of(before), aggregation, mbit(*rates), steps=10)

        assert abs(errors(belief.links, mbit(*rates))).max() < 0.12


def test_directions_are_told_apart():
    """A link that only sends slowly is slow up, not down."""
    aggregation = collocated()
    before, now = (
        mbit(100, 100, 100, 100),
        Links(np.array([30, 100, 100, 100.0]) * 125_000, np.full(4, 12.5e6)),
    )
    belief = after(LinkTracker.of(before), aggregation, now, steps=10)

    assert belief.links.up_bytes_per_s[0] == pytest.approx(30 * 125_000, rel=0.1)
    assert belief.links.down_bytes_per_s == pytest.approx(np.full(4, 12.5e6), rel=0.12)


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
def test_noise_averages_out(noise):
    """On steady links the belief is nearer to them than a single timing, and shares nearly best."""
    aggregation, links = collocated(), mbit(150, 120, 90, 60)
    belief = after(LinkTracker.of(links), aggregation, links, steps=40, noise=noise)
    taken_s, best_s = (
        exchange_s(aggregation, links, shares=optimal_shares(aggregation, each))
        for each in (belief.links, links)
    )

    assert abs(errors(belief.links, links)).mean() < noise
    assert taken_s <= (1 + 0.4 * noise) * best_s


def test_one_exchange_is_a_beginning():
    """Ranks are told apart that were never probed; who was silent is taken for the mean."""
    aggregation, links = collocated(), mbit(150, 120, 90, 30)
    done = play_exchange(aggregation, links, equal_shares(aggregation)).transfers
    found = LinkTracker.first(done).links
    quiet = Transfers(done.num_bytes.copy(), done.seconds, done.busy_s)
    quiet.num_bytes[3, :] = quiet.num_bytes[:, 3] = 0

    # The fastest has nobody who could ask for all it has.
    assert errors(found, links) == pytest.approx(np.array([np.log(120 / 150), 0, 0, 0]), abs=0.05)
    guess = LinkTracker.first(quiet).links.up_bytes_per_s
    assert guess[3] == pytest.approx(guess[:3].mean(), rel=0.3)


def test_small_transfers_say_nothing():
    """Their latency would count as slowness: the belief is the very same."""
    belief = LinkTracker.of(mbit(100, 100))
    tiny = Transfers.from_rows(2, [(0, 1, 100, 0.5), (1, 0, 100, 0.5)])

    assert belief.update(tiny).links.up_bytes_per_s.tolist() == [12.5e6] * 2


def test_renumbered_ranks_have_renumbered_links():
    """Nobody is special."""
    aggregation, links = collocated(), mbit(150, 120, 90, 30)
    done = play_exchange(aggregation, links, equal_shares(aggregation)).transfers
    order = np.array([2, 0, 3, 1])
    turned = Transfers(
        done.num_bytes[np.ix_(order, order)],
        done.seconds[np.ix_(order, order)],
        done.busy_s[:, order],
    )
    one, other = (LinkTracker.first(each).links.up_bytes_per_s for each in (done, turned))

    assert other == pytest.approx(one[order], rel=1e-6)


def test_sums_of_rows_and_figures_that_cannot_be():
    """Chunks add up; the receiver of a wrong figure is named."""
    rows = [(0, 1, 10, 1.0), (0, 1, 20, 2.0), (1, 0, 5, 1.0)]
    transfers = Transfers.from_rows(2, rows)

    assert transfers.num_bytes.tolist() == [[0, 30], [5, 0]]
    assert transfers.seconds.tolist() == [[0, 3], [1, 0]]
    assert transfers.problem() is None
    assert Transfers.from_rows(2, [(0, 1, 10, np.nan)]).problem()[0] == 1
    assert Transfers.from_rows(2, [(0, 1, 10, 0.0)]).problem()[0] == 1


def test_transfers_of_other_ranks_are_refused():
    """With how many there are."""
    with pytest.raises(ValueError, match="the 2 ranks"):
        LinkTracker.of(mbit(1, 1)).update(Transfers.from_rows(3, []))


def in_turn(links, to_fast, to_slow):
    """Three workers push to two servers and pull as much, all one after the other.

    Each transfer is as fast as the slower of its links, so that together they seem as fast as
    three.
    """
    sent = np.zeros((5, 5))
    sent[:3, 3], sent[:3, 4] = to_fast, to_slow
    num_bytes = sent + sent.T
    alone_s = num_bytes / np.minimum.outer(links.up_bytes_per_s, links.down_bytes_per_s)
    in_use_s = np.array([alone_s.sum(axis=1), alone_s.sum(axis=0)])
    return Transfers(num_bytes, alone_s, in_use_s)


def times_the_slow_one(links, transfers, **options):
    """What the slower server is taken for in the end, up and down, over what it is."""
    belief = LinkTracker.of(links)
    for _ in range(20):
        belief = belief.update(transfers, **options)
    found = np.array([belief.links.up_bytes_per_s[4], belief.links.down_bytes_per_s[4]])
    return found / links.up_bytes_per_s[4]


def test_a_link_with_little_to_do_is_taken_for_what_it_carried_in_use():
    """Its short transfers are as fast as the link, one by one: together as three links."""
    links = mbit(100, 100, 100, 100, 20)

    assert times_the_slow_one(links, in_turn(links, 9e5, 1e5)).max() < 1.05


def test_a_server_without_data_is_never_taken_for_more_than_it_carried_in_use():
    """However much it had to do; of others, which also wait for partners, that would be little."""
    links = mbit(100, 100, 100, 100, 20)
    told = in_turn(links, 6e5, 4e5)
    only_serves = np.arange(5) > 2

    assert times_the_slow_one(links, told, only_serves=only_serves).max() < 1.05
    assert times_the_slow_one(links, told).min() > 2


def test_the_planner_knows_who_only_serves():
    """It tells the tracker, whatever plan an exchange ran under."""
    links = mbit(100, 100, 100, 100, 20)
    aggregation = dedicated(workers=3, servers=2)
    planner = SharePlanner(OptimalShares(), aggregation)
    first = play_exchange(aggregation, links, equal_shares(aggregation)).transfers
    told = in_turn(links, 6e5, 4e5)
    for step, transfers in enumerate([first] + [told] * 20):
        planner.observe(step, ObservedExchange(-1, 1.0, transfers), next_step=step + 1)

    assert planner.links.bandwidth_bytes_per_s[4] < 1.05 * links.bandwidth_bytes_per_s[4]


def test_a_link_carries_what_it_carried():
    """Times that were stretched, as some rank was slow that nobody saw, do not make it slower.

    Of what went out, nobody saw for how long any did: that says nothing for certain.
    """
    links = mbit(100, 100, 100, 100, 20)
    each = in_turn(links, 6e5, 4e5)
    stretched = Transfers(each.num_bytes, 9 * each.seconds, each.busy_s)

    assert times_the_slow_one(links, stretched)[1] > 0.93
    assert times_the_slow_one(links, stretched)[0] < 0.5


def test_a_slow_way_out_is_not_taken_for_as_fast_as_the_way_in():
    """Of what went out a rank's rows say nothing for certain, unlike what a simulation knows."""
    aggregation = collocated()
    links = Links(mbit(30, 100, 100, 100).up_bytes_per_s, mbit(100, 100, 100, 100).up_bytes_per_s)
    done = play_exchange(aggregation, links, equal_shares(aggregation)).transfers
    ways = [(s, r, done.num_bytes[s, r], done.seconds[s, r]) for s, r in np.ndindex(4, 4) if s != r]
    came = [(r, r, done.num_bytes[:, r].sum(), done.busy_s[1, r]) for r in range(4)]
    belief = LinkTracker.of(links)
    for _ in range(5):
        belief = belief.update(Transfers.from_rows(4, ways + came))

    assert abs(np.log(belief.links.up_bytes_per_s / links.up_bytes_per_s)).max() < 0.1
