"""Probes meet every pair once, outlast bursts, keep to their budget, and show the links."""

import numpy as np
import pytest

from evenstep.network import Links, Probes, links_from_probes
from evenstep.network._following._probed import Probed, ProbeRound
from evenstep.network._following._probes import pairs
from evenstep.network._plans._fair import fair_transfers

MBIT = 125_000
LONG = Probes(budget_s=1e9)


def made(probes, links, *, burst_bytes=0, between_s=0.01, noise=0.0):
    """All rounds over simulated links, each of which lets a burst through for nothing, and when."""
    size, random = links.world_size, np.random.default_rng(0)
    done, elapsed_s = [], 0.0
    while (probe := probes.next(size, done, elapsed_s)) is not None:
        num_bytes = np.zeros((size, size))
        for way, each in zip(probe.ways, probe.num_bytes, strict=True):
            busiest = max(
                sum(end == other for other in ends) for end, ends in both(way, probe.ways)
            )
            num_bytes[way] = max(1.0, each - burst_bytes / busiest)
        taken = fair_transfers(num_bytes, links).seconds
        taken = taken * np.exp(random.normal(0, noise, taken.shape))
        done.append(Probed(probe, tuple(float(taken[way]) for way in probe.ways)))
        elapsed_s += max(done[-1].seconds) + between_s
    return done, elapsed_s


def both(way, ways):
    """The sender with all senders, and the receiver with all receivers."""
    return zip(way, zip(*ways, strict=True), strict=True)


def found_by(probes, links, **settings):
    """The links as probes show them, and the seconds that took."""
    done, elapsed_s = made(probes, links, **settings)
    return links_from_probes(links.world_size, probes.whole(done)), elapsed_s


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16])
def test_every_pair_meets_once_and_nobody_twice_at_a_time(size):
    """N - 1 rounds, or N of an odd number, both directions of each pair."""
    rounds = list(pairs(size))
    ways = [way for each in rounds for way in each]

    assert len(rounds) == size - 1 + size % 2
    assert sorted(ways) == [(a, b) for a in range(size) for b in range(size) if a != b]
    for each in rounds:
        senders = [sender for sender, _ in each]
        assert len(set(senders)) == len(senders)


def test_pairs_come_first_then_who_may_be_faster_than_they_showed():
    """Rank 3 was seen to be slower than others, and so was 2: they come last. A lone rank: none."""
    done, _ = made(LONG, Links(np.array([300, 300, 100, 20]) * MBIT))
    ones = [each.made.ways[0][1] for each in done if each.made.kind == "one"]

    assert [each.made.kind for each in done] == ["pairs"] * (len(done) - len(ones)) + ["one"] * len(
        ones
    )
    assert list(dict.fromkeys(ones)) == [0, 1, 2, 3]
    assert LONG.next(1, (), 0.0) is None
    assert LONG.next(2, made(LONG, Links(np.full(2, 1e6)))[0], 0.0) is None


def test_among_many_ranks_each_exchanges_with_all_others_and_that_is_all():
    """As many rounds as ranks; none where so many would not end in time."""
    done, _ = made(LONG, Links(np.full(18, 1e7)))

    assert {each.made.kind for each in done} == {"one"}
    assert len({each.made.ways for each in done}) == 18
    assert Probes().next(18, (), 0.0) is not None
    assert Probes().next(40, (), 0.0) is None


@pytest.mark.parametrize(
    "mbit",
    [
        (100, 100, 100, 100),
        (200, 200, 200, 200),
        (300, 300, 100, 20),
        (200, 150, 100, 50),
        (200, 200, 200, 50),
        (1000, 1000, 1000, 10),
    ],
)
def test_four_ranks_are_known_within_three_seconds(mbit):
    """To within 20 %, with bursts of 32 KB as in the lab, of every rank."""
    links = Links(np.array(mbit) * float(MBIT))
    found, elapsed_s = found_by(Probes(), links, burst_bytes=2**15, noise=0.03)

    assert elapsed_s <= 3.0
    assert found.up_bytes_per_s == pytest.approx(links.up_bytes_per_s, rel=0.2)
    assert found.down_bytes_per_s == pytest.approx(links.down_bytes_per_s, rel=0.2)


@pytest.mark.parametrize("budget_s", [0.1, 0.3, 0.6, 0.9, 1.2, 2.0])
@pytest.mark.parametrize("mbit", [(100, 100, 100, 100), (300, 200, 100, 20), (1, 1, 1, 1)])
def test_what_is_unknown_when_time_is_up_stays_unknown(budget_s, mbit):
    """Never a wrong belief, such as of a rank that has met nobody but a slow one, or of a burst."""
    probes, links = Probes(budget_s=budget_s), Links(np.array(mbit) * float(MBIT))
    found, elapsed_s = found_by(probes, links, burst_bytes=2**15)

    assert elapsed_s <= budget_s + 0.2 or mbit[0] == 1
    assert elapsed_s <= budget_s + 2.5
    if found is not None:
        assert found.up_bytes_per_s == pytest.approx(links.up_bytes_per_s, rel=0.2)


def test_hopeless_probing_ends_at_once():
    """On links of 1 Mbit/s seven rounds would take long: it ends as soon as that is known."""
    found, elapsed_s = found_by(Probes(), Links(np.full(4, 1.0 * MBIT)), burst_bytes=2**15)

    assert found is None or elapsed_s <= 3.0
    assert elapsed_s <= 5.0


@pytest.mark.parametrize("seed", range(5))
def test_links_are_found_that_differ_both_ways(seed):
    """Within 5 %, of every rank that the others together can keep busy."""
    random = np.random.default_rng(seed)
    links = Links(random.uniform(20, 60, 6) * 1e6, random.uniform(20, 60, 6) * 1e6)
    found, _ = found_by(LONG, links)

    assert found.pair_bytes_per_s is None
    assert found.up_bytes_per_s == pytest.approx(links.up_bytes_per_s, rel=0.05)
    assert found.down_bytes_per_s == pytest.approx(links.down_bytes_per_s, rel=0.05)


def test_pairs_alone_would_overstate_what_a_rank_carries():
    """Three pairs of 40 add up to 120, and the link carries 40."""
    found, _ = found_by(LONG, Links(np.full(4, 40e6)))

    assert found.up_bytes_per_s == pytest.approx(np.full(4, 40e6), rel=0.03)


def test_a_slow_pair_is_told_from_slow_ranks():
    """It alone has a limit of its own."""
    pair = np.full((4, 4), np.inf)
    pair[1, 2] = 5e6
    found = found_by(LONG, Links(np.full(4, 40e6), pair_bytes_per_s=pair))[0].pair_bytes_per_s

    assert found[1, 2] == pytest.approx(5e6)
    assert np.isinf(found).sum() == 15


def test_pairs_that_add_up_are_found_by_all_at_once():
    """Each pair carries 10 and each rank 30: nothing that pairs show is a rank's own limit."""
    pair = np.full((4, 4), 10e6)
    links = Links(np.full(4, 30e6), pair_bytes_per_s=pair)
    found, _ = found_by(LONG, links)

    assert found.up_bytes_per_s == pytest.approx(np.full(4, 30e6), rel=0.03)
    assert found.pair_bytes_per_s[0, 1] == pytest.approx(10e6)


def test_a_slow_link_is_not_taken_for_what_passes_at_once():
    """A burst of 64 KB is half of what a link of 10 Mbit/s carries in 0.1 s."""
    links = Links(np.array([200, 200, 200, 10]) * float(MBIT))
    found, elapsed_s = found_by(Probes(), links, burst_bytes=2**16)

    assert found.up_bytes_per_s[3] == pytest.approx(10 * MBIT, rel=0.15)
    assert elapsed_s <= 3.0


def test_rounds_that_were_too_short_count_for_nothing():
    """Of a round with one long way, that one is kept; with the whole of a burst, none is."""
    size = 2**20
    short = ProbeRound("pairs", ((0, 1), (1, 0)), (size, size))
    (kept,) = Probes().whole([Probed(short, (0.01, 0.2))])

    assert kept.made.ways == ((1, 0),)
    assert Probes().whole([Probed(short, (0.01, 0.02))]) == []


def test_both_directions_have_to_be_known():
    """Rank 0 receives slower than others send, and what it sends nobody could show but all."""
    links = Links(np.array([30e6, 10e6, 10e6, 10e6]), np.array([5e6, 10e6, 10e6, 10e6]))
    done, _ = made(LONG, links)
    without = [each for each in done if each.made.kind == "pairs" or each.made.ways[0][1] != 0]

    assert links_from_probes(4, LONG.whole(without)) is None
    assert links_from_probes(4, LONG.whole(done)).up_bytes_per_s[0] == pytest.approx(30e6, rel=0.05)


def test_a_rank_faster_than_all_others_is_found():
    """No pair shows it."""
    links = Links(np.array([300, 100, 100, 100]) * float(MBIT))
    found, _ = found_by(Probes(), links)

    assert found.up_bytes_per_s == pytest.approx(links.up_bytes_per_s, rel=0.05)


def test_probes_outlast_a_burst_and_are_bounded():
    """A burst of 1 MB makes a link look twice as fast to a probe of 2 MB, and 2 % to a long one."""
    links = Links(np.array([6e6, 50e6, 50e6]))
    size = {"first_bytes": 2**21, "most_bytes": 2**21}
    short, _ = found_by(Probes(budget_s=1e9, **size), links, burst_bytes=2**20)
    long, elapsed_s = found_by(Probes(budget_s=1e9, least_s=8.0, most_bytes=2**27), links)

    assert short.up_bytes_per_s[0] > 1.9 * 6e6
    assert long.up_bytes_per_s[0] == pytest.approx(6e6, rel=0.05)
    assert elapsed_s <= 6 * 3 * 8.0


def test_what_cannot_be_is_refused():
    """Times that are none, and settings out of range; ranks that nobody probed are unknown."""
    first = LONG.next(3, (), 0.0)
    for seconds in ((0.0, 1.0), (1.0,), (1.0, np.nan)):
        with pytest.raises(ValueError, match="2 positive times"):
            Probed(first, seconds)
    assert (
        links_from_probes(3, [Probed(ProbeRound("pairs", first.ways, (1, 1)), (1.0, 1.0))]) is None
    )
    for arguments in ({"budget_s": 0}, {"least_s": 0}, {"first_bytes": 0}, {"growth": 1}):
        with pytest.raises(ValueError, match=f"Probes\\({next(iter(arguments))}="):
            Probes(**arguments)
