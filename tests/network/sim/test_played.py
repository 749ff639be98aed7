"""Simulated exchanges move the bytes that were planned, and take what the closed forms say."""

import numpy as np
import pytest

from evenstep import Cluster
from evenstep.network import Aggregation, EqualShares, Links, exchange_s, optimal_shares
from evenstep.network._plans._duration import ring_s
from evenstep.network.sim import SharedLinksComm, follow_links
from evenstep.network.sim._played import play_exchange
from evenstep.network.sim._shared_links import timeline_s
from evenstep.sim import Workload, run

LINKS = Links(np.array([200.0, 200, 200, 50]) * 125_000)
AGGREGATION = Aggregation(4, 8_000_000, num_chunks=16)


def test_bytes_are_those_of_the_shares():
    """A rank carries 1 + (N - 2) w of all bytes either way, whatever the links."""
    shares = np.array([0.5, 0.3, 0.2, 0.0])
    moved = play_exchange(AGGREGATION, LINKS, shares).transfers.num_bytes

    assert moved.sum(axis=0) == pytest.approx(8e6 * (1 + 2 * shares))
    assert moved.sum(axis=1) == pytest.approx(8e6 * (1 + 2 * shares))


def test_it_takes_a_little_more_than_the_closed_form():
    """As links are not full to the last moment; all-reduce is a ring."""
    for links in (LINKS, Links(np.array([155.0, 110, 80, 60]) * 125_000)):
        shares = optimal_shares(AGGREGATION, links)
        taken_s = play_exchange(AGGREGATION, links, shares).exchange_s
        formula_s = exchange_s(AGGREGATION, links, shares=shares)
        assert formula_s * (1 - 1e-6) <= taken_s <= 1.1 * formula_s
    assert play_exchange(AGGREGATION, LINKS, None).exchange_s == ring_s(AGGREGATION, LINKS)


def test_the_same_arguments_give_the_same_report():
    """Noise goes by seed, and needs a generator."""
    one, other = (
        follow_links(EqualShares(), AGGREGATION, [LINKS] * 5, noise=0.2, seed=4) for _ in range(2)
    )

    assert one.exchange_s.tolist() == other.exchange_s.tolist()
    assert one.events == other.events
    with pytest.raises(ValueError, match=r"play_exchange\(generator="):
        play_exchange(AGGREGATION, LINKS, None, noise=0.1)


def test_a_simulated_step_ends_with_its_exchange():
    """By shares as the timeline has it, by all-reduce a ring after the slowest."""
    compute_s, shares = np.array([0.1, 0.2, 0.1, 0.1]), np.array([1, 1, 1, 0]) / 3
    by_shares = SharedLinksComm(AGGREGATION, LINKS, shares, overlap=0.5)

    assert by_shares(compute_s) == timeline_s(
        compute_s, AGGREGATION, LINKS, shares=shares, overlap=0.5
    )
    assert SharedLinksComm(AGGREGATION, LINKS)(compute_s) == pytest.approx(
        0.2 + ring_s(AGGREGATION, LINKS)
    )
    slope_s = np.full((3, 4), 0.01)
    report = run("equal", Cluster(4, 40), Workload(np.zeros(4), slope_s), comm=by_shares)
    assert report.step_s == pytest.approx(np.full(3, by_shares(np.full(4, 0.1))))


def test_what_cannot_be_is_refused():
    """Overlaps past 1, and links of other ranks."""
    with pytest.raises(ValueError, match=r"SharedLinksComm\(overlap="):
        SharedLinksComm(AGGREGATION, LINKS, overlap=1.5)
    with pytest.raises(ValueError, match="4 ranks"):
        SharedLinksComm(AGGREGATION, Links(np.ones(3)))
