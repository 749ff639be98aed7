"""Reports that no plan waits for are held and travel together."""

import pytest

from evenstep._exchange._reports import Reports


@pytest.fixture
def sent():
    """What rank 0 was sent."""
    return []


def test_what_may_wait_goes_with_the_next_that_may_not(sent):
    """In the order in which it came."""
    reports = Reports(sent.append)

    reports.add({"step": 0}, may_wait=True)
    reports.add({"step": 1}, may_wait=True)
    assert sent == []
    reports.add({"step": 2}, may_wait=False)
    reports.add({"step": 3}, may_wait=False)

    assert sent == [{"several": [{"step": 0}, {"step": 1}, {"step": 2}]}, {"step": 3}]


def test_a_flush_sends_what_is_held_once(sent):
    """As every heartbeat does."""
    reports = Reports(sent.append)

    reports.add({"step": 0}, may_wait=True)
    reports.flush()
    reports.flush()

    assert sent == [{"step": 0}]


def test_once_another_rank_has_asked_nothing_is_held(sent):
    """It cannot tell which batch it has before it hears of the others'."""
    reports = Reports(sent.append)

    reports.add({"step": 0}, may_wait=True)
    assert reports.received(0, {"hold": False})
    reports.add({"step": 1}, may_wait=True)

    assert sent == [{"step": 0}, {"step": 1}]
