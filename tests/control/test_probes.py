"""Probes meet every pair once, outlast bursts, and show the links that were simulated."""

import numpy as np
import pytest

from evenstep.control import Probes, links_from_probes
from evenstep.control._probes import pairs
from evenstep.sharding import Links, fair_transfers


def made(probes, links, burst_bytes=0):
    """All rounds over simulated links, each of which lets a burst through for nothing."""
    size, num_bytes_sent = links.world_size, 0
    done = []
    for probe in probes.rounds(size):
        while probe is not None:
            num_bytes = np.zeros((size, size))
            for way in probe.ways:
                num_bytes[way] = max(1.0, probe.num_bytes - burst_bytes)
            taken = fair_transfers(num_bytes, links).seconds
            last, seconds = probe, [float(taken[way]) for way in probe.ways]
            num_bytes_sent += probe.num_bytes * len(probe.ways)
            probe = probes.again(probe, seconds)
        done.append((last, seconds))
    return done, num_bytes_sent


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


def test_the_rounds_are_counted_and_a_single_rank_has_none():
    """Pairs, then two for each rank; no pairs among many."""
    kinds = [each.kind for each in Probes().rounds(4)]

    assert kinds == ["pairs"] * 3 + ["to one", "from one"] * 4
    assert Probes().rounds(1) == ()
    assert len(Probes().rounds(40)) == 80


@pytest.mark.parametrize("seed", range(5))
def test_links_are_found_that_differ_both_ways(seed):
    """Within 5 %, of every rank that the others together can keep busy."""
    random = np.random.default_rng(seed)
    links = Links(random.uniform(20, 60, 6) * 1e6, random.uniform(20, 60, 6) * 1e6)
    found = links_from_probes(6, made(Probes(), links)[0])

    assert found.pair_bytes_per_s is None
    assert found.up_bytes_per_s == pytest.approx(links.up_bytes_per_s, rel=0.05)
    assert found.down_bytes_per_s == pytest.approx(links.down_bytes_per_s, rel=0.05)


def test_pairs_alone_would_overstate_what_a_rank_carries():
    """Three pairs of 40 add up to 120, and the link carries 40."""
    found = links_from_probes(4, made(Probes(), Links(np.full(4, 40e6)))[0])

    assert found.up_bytes_per_s == pytest.approx(np.full(4, 40e6), rel=0.03)


def test_a_slow_pair_is_told_from_slow_ranks():
    """It alone has a limit of its own."""
    pair = np.full((4, 4), np.inf)
    pair[1, 2] = 5e6
    found = links_from_probes(
        4, made(Probes(), Links(np.full(4, 40e6), pair_bytes_per_s=pair))[0]
    ).pair_bytes_per_s

    assert found[1, 2] == pytest.approx(5e6)
    assert np.isinf(found).sum() == 15


def test_probes_outlast_a_burst_and_are_bounded():
    """A burst of 1 MB makes a link look twice as fast to a probe of 2 MB, and 2 % to a long one."""
    links = Links(np.array([6e6, 50e6, 50e6]))
    short, _ = made(Probes(first_bytes=2**21, most_bytes=2**21), links, burst_bytes=2**20)
    long, sent = made(Probes(least_s=8.0), links, burst_bytes=2**20)

    assert links_from_probes(3, short).up_bytes_per_s[0] > 1.9 * 6e6
    assert links_from_probes(3, long).up_bytes_per_s[0] == pytest.approx(6e6, rel=0.05)
    assert sent <= 2**27 * 4 / 3 * (6 + 12)


def test_what_cannot_be_is_refused():
    """Times that are none, and ranks that nobody probed."""
    rounds = made(Probes(), Links(np.full(3, 1e6)))[0]
    with pytest.raises(ValueError, match="positive times"):
        links_from_probes(3, [(rounds[0][0], [0.0, 1.0])])
    with pytest.raises(ValueError, match="nothing of rank"):
        links_from_probes(3, rounds[:1])
    for arguments in ({"least_s": 0}, {"first_bytes": 0}, {"growth": 1}):
        with pytest.raises(ValueError, match=f"Probes\\({next(iter(arguments))}="):
            Probes(**arguments)
