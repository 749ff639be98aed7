"""When a jump is believed."""

import numpy as np

from evenstep.prediction._affine_filter import judge, no_jumps_yet

ALL, NONE = np.ones(2, bool), np.zeros(2, bool)
LONG = np.ones(2)  # seconds: past any pause


def after(*jumps, memory=None, seconds=1.0):
    """Return the last verdict on jumps of rank 0, in steps that took ``seconds``."""
    memory = no_jumps_yet(2) if memory is None else memory
    for jump in jumps:
        verdict = judge(np.array([jump, 0]), seconds * LONG, ran=ALL, young=NONE, memory=memory)
        memory = verdict.memory
    return verdict


def test_the_first_jump_is_held_back_and_the_second_followed():
    """In the same direction; the other worker is not concerned."""
    assert after(1).hold.tolist() == [True, False]
    assert after(1, 1).accept.tolist() == [True, False]
    assert after(1, -1).hold.tolist() == [True, False]
    assert after(1, 0, 1).hold.tolist() == [True, False]


def test_a_pause_over_several_short_steps_is_no_lasting_change():
    """Steps of 30 ms have to be off four times in a row, 0.1 s in all, before they are believed."""
    assert after(1, 1, 1, seconds=0.03).hold.tolist() == [True, False]
    assert after(1, 1, 1, 1, seconds=0.03).accept.tolist() == [True, False]
    assert after(1, 1, 0, 1, 1, seconds=0.03).hold.tolist() == [True, False]


def test_a_worker_with_little_behind_it_is_followed():
    """Which of its two readings is the odd one cannot be told."""
    verdict = judge(
        np.array([1, 1]), LONG, ran=ALL, young=np.array([True, False]), memory=no_jumps_yet(2)
    )

    assert verdict.accept.tolist() == [True, False]
    assert verdict.hold.tolist() == [False, True]


def test_jumps_that_lasted_earn_trust_and_those_that_passed_lose_it():
    """After a lasting one the next is believed at once; after a few that passed, no more."""
    trusting = after(1, 1, 0, 0)
    believed = after(-1, memory=trusting.memory)
    disappointed = after(*[1, -1, 0] * 5, memory=trusting.memory)

    assert believed.accept.tolist() == [True, False]
    assert after(1, memory=disappointed.memory).hold.tolist() == [True, False]


def test_a_believed_jump_that_is_undone_is_undone_at_once():
    """The way back is followed too, whatever the trust."""
    believed = after(1, memory=after(1, 1, 0, 0).memory)

    assert after(-1, memory=believed.memory).accept.tolist() == [True, False]


def test_a_worker_that_did_not_run_keeps_its_open_jump():
    """It is judged by its own next step."""
    held = after(1)
    idle = judge(
        np.array([0, 0]), LONG, ran=np.array([False, True]), young=NONE, memory=held.memory
    )

    assert after(1, memory=idle.memory).accept.tolist() == [True, False]
