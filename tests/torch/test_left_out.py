"""What is no computing inside of a step is left out of its time once."""

from __future__ import annotations

from contextlib import suppress

import pytest

from evenstep._planner import Phase
from evenstep.torch._step._meter import HostClock, StepMeter


class Loop:
    """A step on a clock that is set by hand, and collectives that are counted by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_collectives = 0
        self.meter = StepMeter(HostClock(lambda: self.now_s), lambda: self.num_collectives)
        self.meter.timeline.begin(0)
        self.meter.begin()

    def go(self, seconds: float) -> None:
        self.now_s += seconds

    def compute_s(self) -> float:
        """Run a forward and a backward of 1 s each, and return what counts."""
        self.meter.close_gap()
        self.go(1.0)
        self.meter.open_gap()
        self.meter.close_gap(Phase.BACKWARD)
        self.go(1.0)
        self.meter.end()
        time = self.meter.take()
        assert time is not None
        seconds = time.seconds()
        assert seconds is not None
        return seconds


@pytest.mark.parametrize("phase", [Phase.EVALUATION, Phase.CHECKPOINT, Phase.MEAN])
def test_what_comes_between_hand_out_and_forward_is_no_computing(phase: Phase) -> None:
    loop = Loop()
    with loop.meter.block(phase):
        loop.go(5.0)
    assert loop.compute_s() == 2.0


def test_a_collective_in_an_evaluation_is_left_out_once() -> None:
    loop = Loop()
    with loop.meter.block(Phase.EVALUATION):
        loop.go(5.0)
        with loop.meter.block(Phase.MEAN):
            loop.num_collectives += 1
            loop.go(1.0)
    assert loop.compute_s() == 2.0


def test_an_evaluation_that_is_broken_off_is_left_out() -> None:
    loop = Loop()
    with suppress(KeyError), loop.meter.block(Phase.EVALUATION):
        loop.go(5.0)
        raise KeyError
    assert loop.compute_s() == 2.0


def test_one_that_ends_in_a_later_step_takes_nothing_from_it() -> None:
    loop = Loop()
    left = loop.meter.block(Phase.EVALUATION)
    left.__enter__()
    loop.go(5.0)
    loop.meter.timeline.begin(1)
    loop.meter.begin()
    loop.go(0.5)
    left.__exit__(None, None, None)
    assert loop.compute_s() == 2.5
