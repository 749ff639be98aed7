"""Links are measured in turns that fit into their time, and who does not answer is named."""

import math
import socket
import threading
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep._doctor import TURN_S, LinkServer, measure_link, schedule

TOKEN = "0123456789abcdef"


def pairs_of(turns):
    return [pair for turn in turns for pair in turn]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.floats(0.5, 100))
def test_turns_fit_into_their_time(sizes, budget_s):
    """No rank is in two pairs of a turn, pairs go both ways, and what is left out is counted."""
    hosts, next_rank = [], 0
    for size in sizes:
        hosts.append(list(range(next_rank, next_rank + size)))
        next_rank += size
    turns, skipped = schedule(hosts, turn_s=1.0, budget_s=budget_s)
    pairs = pairs_of(turns)
    between = {frozenset(pair) for pair in combinations([ranks[0] for ranks in hosts], 2)}
    inside = {frozenset(ranks[:2]) for ranks in hosts if len(ranks) > 1}
    measured = {frozenset(pair) for pair in pairs}

    for turn in turns:
        ends = [rank for pair in turn for rank in pair]
        assert len(ends) == len(set(ends))
    assert len(turns) <= max(4, budget_s)
    assert len(pairs) == len(set(pairs)) == 2 * len(measured)
    assert inside <= measured <= between | inside
    assert len(between - measured) == skipped


def test_few_hosts_measure_one_by_one():
    """Nothing else is on the links then."""
    turns, skipped = schedule([[0], [1], [2]], turn_s=1.0, budget_s=6.0)

    assert [len(turn) for turn in turns] == [1] * 6
    assert skipped == 0


def test_many_hosts_measure_as_in_a_tournament():
    """All at once in pairs: sixteen hosts meet each other in fifteen rounds, each both ways."""
    turns, _ = schedule([[rank] for rank in range(16)], turn_s=1.0, budget_s=30.0)

    assert [len(turn) for turn in turns] == [8] * 30
    assert len(set(pairs_of(turns))) == 16 * 15


def test_a_thousand_hosts_stay_in_the_time():
    """Every host is measured with some others."""
    turns, skipped = schedule([[rank] for rank in range(1000)], turn_s=TURN_S, budget_s=20.0)
    met = {rank for pair in pairs_of(turns) for rank in pair}

    assert len(turns) * TURN_S <= 20.0
    assert met == set(range(1000))
    assert skipped == math.comb(1000, 2) - len(pairs_of(turns)) // 2


def test_a_link_is_measured():
    """A positive rate and a round trip, over this machine's loopback."""
    with LinkServer(TOKEN) as server:
        found = measure_link(0, 1, ("127.0.0.1", server.port), TOKEN)

    assert (found.receiver, found.sender, found.error) == (0, 1, "")
    assert found.mbit > 1
    assert 0 < found.round_trip_s < 1


def test_a_stranger_is_not_answered():
    """Whoever does not know the token gets a closed connection, and the next one is served."""
    with LinkServer(TOKEN) as server:
        refused = measure_link(0, 1, ("127.0.0.1", server.port), "x" * len(TOKEN))
        served = measure_link(0, 1, ("127.0.0.1", server.port), TOKEN)

    assert "closed" in refused.error or "reset" in refused.error
    assert served.error == ""


def test_nobody_listening_is_an_error_in_words():
    """As of a firewall that refuses."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = measure_link(3, 4, ("127.0.0.1", port), TOKEN)

    assert (found.bytes_per_s, found.error) == (0.0, "Connection refused")


@pytest.mark.parametrize("says", [b"", b"P" * 10])
def test_one_that_ends_in_between_is_an_error_in_words(says):
    """A peer that takes the connection and goes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take():
            connection, _ = server.accept()
            with connection:
                connection.recv(len(TOKEN))
                connection.sendall(says)

        thread = threading.Thread(target=take)
        thread.start()
        found = measure_link(0, 1, ("127.0.0.1", server.getsockname()[1]), TOKEN)
        thread.join()

    assert found.error != ""


def test_the_server_is_gone_after_its_with():
    """Its port is free, and its thread has ended."""
    before = threading.active_count()
    with LinkServer(TOKEN) as server:
        port = server.port
    found = measure_link(0, 1, ("127.0.0.1", port), TOKEN)

    assert found.error == "Connection refused"
    assert threading.active_count() <= before + 1
