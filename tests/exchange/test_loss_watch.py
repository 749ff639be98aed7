"""A thread that a loss keeps in a collective is ended; any other is left to come by."""

import pytest

from evenstep._exchange._lost_ranks import FailureWatch, lost_worker
from evenstep.exceptions import WorkerLostError

LOSS = lost_worker(1, "b", "it is gone", done=6, restart="somebody does")


class Watched:
    """A watch whose seconds are told, over a thread that sits in a collective or does not."""

    def __init__(self, *, stuck=True):
        self.now_s = 100.0
        self.ended = []
        self.watch = FailureWatch(
            grace_s=3.0,
            abort=self.ended.append,
            is_stuck=lambda thread_id: stuck and thread_id == 7,
            clock=lambda: self.now_s,
        )

    def ended_at(self, *seconds):
        """Let the seconds pass one after the other; return at which the process was ended."""
        for self.now_s in seconds:
            self.watch.end_if_stuck(7)
            if self.ended:
                return self.now_s
        return None


def test_a_loss_is_raised_wherever_it_is_asked_for():
    """And before it nothing is."""
    watch = Watched().watch
    watch.check()
    watch.note(LOSS)

    with pytest.raises(WorkerLostError, match="Rank 1 on b was lost: it is gone"):
        watch.check()


def test_the_grace_begins_with_the_loss():
    """Whoever was in the collective for long may come out of it as late as anybody."""
    watched = Watched()
    watched.watch.enter_collective()
    watched.now_s = 200.0
    watched.watch.note(LOSS)

    assert watched.ended_at(201.0, 203.0, 203.5) == 203.5
    assert watched.ended == [str(LOSS)]


def test_the_grace_begins_anew_with_a_collective():
    """The loss is known for long: one that asks nobody gets its time in each of them."""
    watched = Watched()
    watched.watch.note(LOSS)
    watched.now_s = 200.0
    watched.watch.enter_collective()

    assert watched.ended_at(203.0, 204.0) == 204.0


def test_nobody_is_ended_who_can_hear_of_it():
    """Outside of a collective, by its own word or by the frame that it is in; or without a loss."""
    left, elsewhere, whole = Watched(), Watched(stuck=False), Watched()
    for watched in (left, elsewhere, whole):
        assert watched.watch.enter_collective()
        assert not watched.watch.enter_collective()
    for watched in (left, elsewhere):
        watched.watch.note(LOSS)
    left.watch.leave_collective()

    assert [watched.ended_at(200.0) for watched in (left, elsewhere, whole)] == [None] * 3
    assert [watched.watch.in_collective for watched in (left, elsewhere)] == [False, True]


def test_collectives_are_broken_off_once_and_soon_after_a_loss():
    """After a third of the grace: who is in none hears of the loss by itself meanwhile."""
    now_s, released = [100.0], []
    watch = FailureWatch(
        grace_s=3.0,
        abort=lambda message: None,
        is_stuck=lambda thread_id: False,
        release=lambda: released.append(now_s[0]),
        clock=lambda: now_s[0],
    )
    for now_s[0] in (100.0, 110.0):
        watch.end_if_stuck(7)
    watch.note(LOSS)
    for now_s[0] in (110.5, 111.5, 120.0):
        watch.end_if_stuck(7)

    assert released == [111.5]


def test_who_was_released_late_has_all_of_the_grace_to_come_out():
    """On a machine so busy that the first look after the loss comes past the grace."""
    now_s, ended = [100.0], []
    watch = FailureWatch(
        grace_s=3.0,
        abort=lambda message: ended.append(now_s[0]),
        is_stuck=lambda thread_id: True,
        release=lambda: None,
        clock=lambda: now_s[0],
    )
    watch.enter_collective()
    watch.note(LOSS)
    for now_s[0] in (110.0, 112.0, 114.0):
        watch.end_if_stuck(7)

    assert ended == [114.0]
