"""Ranks that end their run before the others: who hears of it, and when it is a loss."""

import socket
import threading
from contextlib import contextmanager

import pytest

from evenstep._exchange._exchange import Exchange
from evenstep.events import StepMeasured

from .channels import channel_over
from .exchanges import PLAIN, pairs, report, reports_of


@contextmanager
def three():
    """Three connected exchanges, none of which has begun a step."""
    ends = {rank: socket.socketpair() for rank in (1, 2)}
    stars = [{rank: ends[rank][0] for rank in ends}, *({0: ends[rank][1]} for rank in ends)]
    found = [
        Exchange(
            rank,
            ["a", "b", "c"],
            channel_over(star, heartbeat_s=0.05, deadline_s=10.0),
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
            leaving.lost_ranks.script_failed(ValueError("sample 17 has no label"))
            leaving.close()
        asking.lost_ranks.enter_collective()
        if not departs_first:
            assert asking.lost_ranks.verdict(within_s=0.2) is None
            leaving.lost_ranks.script_failed(ValueError("sample 17 has no label"))
            leaving.close()
        error = asking.lost_ranks.verdict(within_s=20)

        assert "Rank 2 on c was lost: it raised ValueError: sample 17 has no label" in str(error)
        assert error.rank == 2


def test_a_rank_that_nobody_needs_is_no_loss():
    """As at the end of a run, where some come earlier than others."""
    with three() as (first, other, leaving):
        leaving.close()
        other.close()
        first.close()

        assert not first.lost_ranks.is_broken
        assert not other.lost_ranks.is_broken


@pytest.mark.parametrize("told", ["reports", "ends"])
def test_rank_0_ends_with_the_last_reports_of_all(told):
    """It comes first to its end, with what others did not yet send: the last steps are measured."""
    with pairs() as make:
        (first, other), emitted = make(heartbeat_s=1.0)
        report(first, 0, reports_of(0, 0, 8))
        closing = threading.Thread(target=first.close)
        closing.start()
        closing.join(0.2)  # long enough to end too early
        if told == "reports":
            report(other, 0, reports_of(1, 0, 8))
        else:
            other.close()
        closing.join(5)
        steps = [event.step for event in list(emitted.queue) if isinstance(event, StepMeasured)]

        assert not closing.is_alive()
        assert steps == [0] * (told == "reports")
