"""Which link all ranks wait for, by what connections carried: of which kind, or none at all."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._diagnosis import Cause, HostClues, LinkClues
from evenstep._diagnosis._slow_links import LinkBooks, LinkFault, LinkLoads, slow_links

from .runs import names, shown, steps

FAST = 200.0
WAITS = 0.8  # of the time


def loads(mbit, *, waits=WAITS, by_reader=(), resent=(), host=lambda rank: rank):
    """Links by (sender, receiver) that carried as much, at these rates while they were busy.

    The slowest is busy all the time for which ranks wait, as around a ring.
    """
    ends, rates = np.array(list(mbit)), np.array(list(mbit.values()), np.float64)
    by_reader, resent = defaultdict(float, by_reader), defaultdict(float, resent)
    hosts = np.vectorize(host)(ends)
    return LinkLoads(
        *(ends[:, 0], ends[:, 1], hosts[:, 0], hosts[:, 1]),
        acked_bytes=np.full(len(ends), 1e8),
        bytes_per_s=rates * 125_000,
        busy=waits * rates.min() / rates,
        by_reader=np.array([by_reader[tuple(pair)] for pair in ends]),
        resent=np.array([resent[tuple(pair)] for pair in ends]),
    )


def ring(world_size, **mbit):
    """Rates of a ring in which each rank sends to the one before it; ``r2`` is what rank 2 does."""
    return {
        (rank, (rank - 1) % world_size): mbit.get(f"r{rank}", FAST) for rank in range(world_size)
    }


def said(found):
    return [(one.fault, one.rank, one.peer) for one in found]


@pytest.mark.parametrize("world_size", [4, 6])
@pytest.mark.parametrize(
    ("mbit", "expected"),
    [
        ({"r2": 38, "r3": 80}, (LinkFault.EGRESS, 2, 1)),  # answers to rank 3 wait behind its bytes
        ({"r2": 38, "r1": 60}, (LinkFault.INGRESS, 1, 2)),  # answers to rank 1 come behind them
        ({"r2": 38, "r1": 170, "r3": 140}, (LinkFault.LINK, 2, 1)),
        ({"r2": 38, "r1": 80, "r3": 80}, (LinkFault.LINK, 2, 1)),  # which end is not known
        ({"r2": 35, "r1": 36}, (LinkFault.INGRESS, 1, 2)),  # deep queues: answers take as long
    ],
)
def test_a_ring_shows_by_its_answers_which_end_of_a_link_is_slow(world_size, mbit, expected):
    """Rates as measured: what goes the other way on a slow way has to wait as well."""
    assert said(slow_links(loads(ring(world_size, **mbit)), WAITS)) == [expected]


def test_a_way_is_slow_where_all_links_on_it_are():
    """All to all, so each host has several."""
    pairs = {(a, b): FAST for a in range(4) for b in range(4) if a != b}
    out = pairs | {(2, b): 40.0 for b in (0, 1, 3)}
    into = pairs | {(a, 2): 40.0 for a in (0, 1, 3)}

    assert said(slow_links(loads(out), WAITS))[0][:2] == (LinkFault.EGRESS, 2)
    assert said(slow_links(loads(into), WAITS))[0][:2] == (LinkFault.INGRESS, 2)
    assert said(slow_links(loads(pairs | {(2, 1): 40.0}), WAITS)) == [(LinkFault.LINK, 2, 1)]
    two = loads(pairs | {(2, 1): 42.0, (2, 3): 40.0})
    assert said(slow_links(two, WAITS)) == [(LinkFault.LINK, 2, 3)]  # a rank is named once


def test_ranks_of_one_host_share_its_ways():
    """Two hosts' worth of ranks: the way out is the host's, whichever of its ranks sends."""
    host = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    mbit = {(0, 2): 40.0, (1, 4): 42.0, (2, 4): FAST, (3, 0): FAST, (4, 0): FAST, (5, 2): FAST}

    assert said(slow_links(loads(mbit, host=host.get), WAITS))[0] == (LinkFault.EGRESS, 0, 2)


def test_a_slow_reader_is_named_and_no_link():
    """The kernel counts for how long the other end's window was closed."""
    mbit = ring(4, r3=115)
    reader = loads(mbit, by_reader={(3, 2): 0.88})

    assert said(slow_links(reader, WAITS)) == [(LinkFault.READER, 2, 3)]
    assert slow_links(loads(mbit), WAITS) == ()  # of a link, that would be too little
    beside = loads(mbit | {(0, 3): 140}, by_reader={(3, 2): 0.88})
    assert said(slow_links(beside, WAITS)) == [(LinkFault.READER, 2, 3)]


def test_much_that_is_sent_again_is_a_loss():
    """A queue that overflows before a slow link drops some as well, but less."""
    mbit = ring(4, r3=40)

    assert said(slow_links(loads(mbit, resent={(3, 2): 0.08}), WAITS)) == [(LinkFault.LOSS, 3, 2)]
    assert said(slow_links(loads(mbit, resent={(3, 2): 0.03}), WAITS)) == [(LinkFault.LINK, 3, 2)]


def test_of_two_slow_links_the_second_would_hide_behind_the_first():
    """By as much as it is faster."""
    found = slow_links(loads(ring(6, r1=40, r4=50)), WAITS)

    assert [(one.rank, one.peer) for one in found] == [(1, 0), (4, 3)]
    assert [one.hides for one in found] == pytest.approx([1.0, 0.8])


rates = st.lists(st.floats(110.0, 200.0), min_size=2, max_size=9)


@given(rates)
def test_links_that_are_alike_have_no_name(mbit):
    """Up to nearly twice as fast as others: a busy machine's are."""
    names = {f"r{rank}": rate for rank, rate in enumerate(mbit)}
    assert slow_links(loads(ring(len(mbit), **names)), WAITS) == ()


def test_where_many_are_slow_some_are_fast():
    """Half of the hosts may have older cards: that is no fault of one link."""
    assert slow_links(loads(ring(6, r1=40, r3=41, r5=42)), WAITS) == ()
    assert slow_links(loads(ring(6, r0=80, r1=80, r2=80, r3=80)), WAITS) == ()
    assert slow_links(loads(ring(8, r1=40, r4=50, r6=52)), WAITS) == ()


@pytest.mark.parametrize(
    ("mbit", "expected"),
    [  # as measured: of two at once, all neighbours are slower
        ([151, 156, 48, 62, 53, 46], {(LinkFault.INGRESS, 4), (LinkFault.EGRESS, 2)}),
        ([49, 38.4, 37.8, 55, 116, 207], {(LinkFault.INGRESS, 0), (LinkFault.EGRESS, 2)}),
    ],
)
def test_of_two_at_once_both_are_named_with_their_ends(mbit, expected):
    """The answers of each still show."""
    rates = {f"r{rank}": rate for rank, rate in enumerate(mbit)}
    found = slow_links(loads(ring(6, **rates)), WAITS)

    assert {(one.fault, one.rank) for one in found} == expected


@given(st.integers(3, 9), st.floats(1.0, 80.0), st.data())
def test_one_that_is_much_slower_has_one(world_size, slow, data):
    """Whoever it is, and whatever the unit; and none if it was seldom busy while ranks waited."""
    rank = data.draw(st.integers(0, world_size - 1))
    found = loads(ring(world_size, **{f"r{rank}": slow}))
    order = np.array(data.draw(st.permutations(range(world_size))))

    assert said(slow_links(found, WAITS)) == [(LinkFault.LINK, rank, (rank - 1) % world_size)]
    again = LinkLoads(*(column[order] for column in found))
    assert said(slow_links(again, WAITS)) == said(slow_links(found, WAITS))
    faster = found._replace(bytes_per_s=1000 * found.bytes_per_s)
    assert slow_links(faster, WAITS) == slow_links(found, WAITS)
    assert slow_links(found._replace(busy=found.busy / 3), WAITS) == ()


@given(st.integers(2, 5), st.data())
def test_whatever_was_carried_two_are_named_at_most(world_size, data):
    """Two ranks, with ends that are ranks, and the slowest hides none."""
    pairs = [(a, b) for a in range(world_size) for b in range(world_size) if a != b]
    mbit = {pair: data.draw(st.floats(0.1, 1e5)) for pair in pairs}
    parts = {pair: data.draw(st.floats(0, 1)) for pair in pairs}
    found = slow_links(loads(mbit, by_reader=parts, resent=parts), WAITS)

    assert len(found) <= 2
    assert len({one.rank for one in found}) == len(found)
    for one in found:
        assert (one.rank, one.peer) in mbit
        assert 0 < one.hides <= 1
    assert not found or found[0].hides == 1


def looks(whose, rank, *links):
    """Have a rank report links, over ten seconds."""
    whose(rank, HostClues(0, 10.0, links=links))


def end(here, there, megabytes=0.0, seconds=0.0, *, port=5000):
    """One end of a connection: ranks' addresses, and ports that are those of its sender."""
    sender_port = port + (0 if megabytes else 1)
    ends = f"10.0.0.{here}:{sender_port}", f"10.0.0.{there}:{2 * port + 1 - sender_port}"
    return LinkClues(*ends, int(megabytes * 1e6), int(seconds * 1e6), 0, 1000, 10)


def test_a_link_is_what_leads_from_a_rank_to_a_rank():
    """Both of its ends have to be known: others lead to storage, or a store."""
    books = LinkBooks(2, 60.0)
    looks(books.add, 0, end(0, 1, 50, 5), end(0, 7, 500, 1))
    assert books.links(whole_run=True).sender.tolist() == []
    looks(books.add, 1, end(1, 0))
    found = books.links(whole_run=True)

    carrying = found.acked_bytes > 0
    assert found.sender[carrying].tolist() == [0]
    assert found.receiver[carrying].tolist() == [1]
    assert found.bytes_per_s[carrying] == pytest.approx([10e6])
    assert found.busy[carrying] == pytest.approx([0.5])
    assert found.resent[carrying] == pytest.approx([0.01])


def test_connections_of_one_link_are_busy_at_the_same_time():
    """As NCCL's: rates add up."""
    books = LinkBooks(2, 60.0)
    looks(books.add, 0, end(0, 1, 50, 5), end(0, 1, 50, 5, port=7000))
    looks(books.add, 1, end(1, 0), end(1, 0, port=7000))

    assert books.links(whole_run=True).bytes_per_s.max() == pytest.approx(20e6)


def test_the_newest_seconds_forget_what_the_run_keeps():
    """A link that was slow at first, and is no longer."""
    books = LinkBooks(2, 20.0)
    for seconds in (9.0, 1.0, 1.0, 1.0):
        looks(books.add, 0, end(0, 1, 9, seconds))
        looks(books.add, 1, end(1, 0))

    assert books.links(whole_run=False).bytes_per_s.max() == pytest.approx(9e6)
    assert books.links(whole_run=True).bytes_per_s.max() == pytest.approx(3e6)


def diagnosed_with(seconds, *, exchange):
    """What is said where the links of a ring are busy for so long."""
    diagnoser = shown(steps(60, 4, exchange=exchange))
    for rank, busy_s in enumerate(seconds):
        sent = end(rank, (rank - 1) % 4, 60, busy_s)
        looks(diagnoser.add_host, rank, sent, end(rank, (rank + 1) % 4))
    return diagnoser.diagnose()


def test_the_network_has_the_rank_of_the_slow_link():
    """With rates, and what all lose by it; and none where all links are alike, or none is seen."""
    slow = diagnosed_with([3.0, 3.2, 9.0, 4.0], exchange=60_000)
    assert names(slow) == [(Cause.NETWORK, 2)]
    evidence = slow.evidence[0]
    assert "its link to rank 1 carries 53.3 Mbit/s where others carry 120 to 160" in evidence
    assert "all ranks wait together for the exchange" in evidence

    alike = diagnosed_with([3.0, 3.2, 3.1, 3.0], exchange=60_000)
    assert names(alike) == [(Cause.NETWORK, None)]
    assert "no link is much slower than the others: 150 to 160 Mbit/s" in alike.evidence[0]
    unseen = diagnosed_with([], exchange=60_000)
    assert "no TCP connections between hosts are seen" in unseen.evidence[0]

    assert names(diagnosed_with([3.0, 3.2, 9.0, 4.0], exchange=5_000)) == []


def test_the_second_link_costs_what_it_would_alone():
    """It hides behind the first, and is as much faster."""
    found = diagnosed_with([9.0, 3.0, 7.5, 3.0], exchange=60_000)

    assert names(found) == [(Cause.NETWORK, 0), (Cause.NETWORK, 2)]
    assert found.lost_share[1] == pytest.approx(found.lost_share[0] * 7.5 / 9)


def test_what_shares_of_the_links_would_bring_is_said_of_a_slow_way():
    """An exchange around a ring of four takes 3/2 of what is possible."""
    found = diagnosed_with([3.0, 3.2, 9.0, 6.0], exchange=60_000)

    assert found.evidence[0].startswith("it sends at 53.3 Mbit/s where others send at")
    assert "`Balancer(network=Network())` may shorten the exchange to 67 %" in found.remedy[0]
