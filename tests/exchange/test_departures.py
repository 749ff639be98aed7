"""Ranks that end their run before the others: who hears of it, and when it is a loss."""

import socket
from contextlib import contextmanager

import pytest

from evenstep._exchange._channel import StarChannel
from evenstep._exchange._exchange import Exchange

from .exchanges import PLAIN


@contextmanager
def three():
    """Three connected exchanges, none of which has begun a step."""
    ends = {rank: socket.socketpair() for rank in (1, 2)}
    stars = [{rank: ends[rank][0] for rank in ends}, *({0: ends[rank][1]} for rank in ends)]
    found = [
        Exchange(
            rank,
            ["a", "b", "c"],
            StarChannel(star, heartbeat_s=0.05, deadline_s=10.0),
            framework=PLAIN,
            emit=lambda event: None,
            heartbeat_s=0.05,
        )
        for rank, star in enumerate(stars)
    ]
    for exchange in found:
        exchange.start()
    yield found
    for exchange in found:
        exchange.close()


@pytest.mark.parametrize("departs_first", [True, False])
def test_a_rank_whose_collective_broke_learns_who_left(departs_first):
    """Though rank 0 alone hears of that, whichever it hears of first."""
    with three() as (_, asking, leaving):
        if departs_first:
            leaving.losses.script_failed(ValueError("sample 17 has no label"))
            leaving.close()
        asking.losses.enter_collective()
        if not departs_first:
            assert asking.losses.verdict(within_s=0.2) is None
            leaving.losses.script_failed(ValueError("sample 17 has no label"))
            leaving.close()
        error = asking.losses.verdict(within_s=20)

        assert "Rank 2 on c was lost: it raised ValueError: sample 17 has no label" in str(error)
        assert error.rank == 2


def test_a_rank_that_nobody_needs_is_no_loss():
    """As at the end of a run, where some come earlier than others."""
    with three() as (first, other, leaving):
        leaving.close()
        other.close()
        first.close()

        assert not first.losses.is_broken
        assert not other.losses.is_broken
