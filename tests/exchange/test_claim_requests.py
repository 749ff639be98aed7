"""Claims on their way between two ranks: each is answered, by the plan of its step."""

import threading

import pytest

from evenstep._exchange._message_kinds import ClaimReply
from evenstep._planner._claim_switch import ClaimSwitch
from evenstep.claims import Hybrid
from evenstep.claims._step_claims import Claim

from .exchanges import pairs, report, reports_of


@pytest.fixture
def star():
    """Two exchanges over a pair of sockets, whose steps are up for claims."""
    with pairs() as make:
        yield lambda lag: make(lag=lag, claims=ClaimSwitch(Hybrid(first=0.5), adaptive=False))[0]


def all_claims(exchange, step):
    """Claim until nothing is left; return how many samples that gave."""
    count = 0
    while granted := exchange.claims.claim(step):
        count += sum(claim.num_samples for claim in granted)
    return count


def in_thread(call):
    """Start ``call`` in a thread, with a list for what it returns or raises."""
    result = []

    def run():
        try:
            result.append(call())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


@pytest.mark.parametrize("first_step", [0, 57])
def test_a_rank_behind_claims_by_the_plan_of_its_step(star, first_step):
    """Rank 0 may have gone on where nobody waits for a device, and claimed nothing itself."""
    both = star(lag=1)
    for step in range(first_step, first_step + 6):
        sizes = [both[rank].at(step).batch_size for rank in (0, 1)]
        report(both[0], step, reports_of(0, step, sizes[0][0]))
        both[0].at(step + 1)

        thread, counts = in_thread(lambda step=step: all_claims(both[1], step))
        thread.join(5)

        assert sizes[0] == sizes[1]
        assert counts == [16 - sum(size // 2 for size in sizes[1])]
        report(both[1], step, reports_of(1, step, sizes[1][1]))


def test_rank_0_answers_to_the_end_of_the_last_step(star):
    """It may come to its own end long before the others, who claim until nothing is left."""
    both = star(lag=1)
    for exchange in both:
        exchange.at(0)
    mine = all_claims(both[0], 0)
    report(both[0], 0, [])
    closing, _ = in_thread(both[0].close)
    closing.join(0.2)
    theirs = all_claims(both[1], 0)
    report(both[1], 0, [])
    closing.join(5)

    assert mine + theirs == 8
    assert not closing.is_alive()


def test_rank_0_waits_for_nobody_who_has_ended(star):
    """Such as one that left the step in the middle."""
    both = star(lag=0)
    for exchange in both:
        exchange.at(0)
    all_claims(both[0], 0)
    both[1].close()
    closing, _ = in_thread(both[0].close)
    closing.join(5)

    assert not closing.is_alive()


def test_the_answer_to_a_claim_that_was_broken_off_is_nobody_elses(star):
    """As where a signal's handler raises in the wait for it."""
    both = star(lag=0)
    both[1].at(0)
    claims = both[1].claims
    with both[0].claims._lock:  # which is slow to answer
        claiming, granted = in_thread(lambda: claims.claim(0))
        while claims.awaited is None:
            assert claiming.is_alive()
        claims.received(0, ClaimReply(0, (Claim(0, 4, 8),)))
    claiming.join(5)

    assert granted != [(Claim(0, 4, 8),)]
    assert granted[0][0].owner == 1
