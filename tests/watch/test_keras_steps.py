"""A worker's steps under Keras, from marks: where the time goes, and what is no step."""

import subprocess
import sys

import pytest

from evenstep._diagnosis import Phase
from evenstep.watch._keras_watch import KerasSteps


class Clock:
    """Stands still until it is moved on."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    """One at 0."""
    return Clock()


@pytest.fixture
def steps(clock):
    """Steps without garbage."""
    records = []
    made = KerasSteps(records.append, gc_s=lambda: 0.0, now=clock)
    made.records = records
    return made


def train(steps, clock, *, input_s=0.0, asked_s=0.0, own_s=1.0, reduced_s=0.0):
    """Make one call of the training function."""
    steps.begin()
    clock.now_s += input_s
    steps.fetched()
    clock.now_s += asked_s
    steps.batch_there(12, 384)
    clock.now_s += own_s
    steps.gradients_done()
    clock.now_s += reduced_s
    steps.end(is_whole=True)


def spent_s(record):
    """Seconds by phase, those without any left out."""
    return {Phase(at): us / 1e6 for at, us in enumerate(record.spent_us) if us}


def test_a_step_is_told_apart_by_its_marks(steps, clock):
    """Own input and computing, waits for others, and the rest of the loop up to the next step."""
    train(steps, clock, input_s=1, asked_s=2, own_s=3, reduced_s=4)
    clock.now_s += 5
    steps.begin()

    (record,) = steps.records
    assert (record.step, record.num_samples, record.clues.size) == (0, 12, 384)
    assert spent_s(record) == {
        Phase.INPUT: 1,
        Phase.MEETING: 2,
        Phase.FORWARD: 3,
        Phase.REDUCTION: 4,
        Phase.REST: 5,
    }


def test_evaluations_and_checkpoints_are_their_own_time(steps, clock):
    """The outermost counts; marks of an evaluation's own batches are none of a step's."""
    train(steps, clock)
    steps.enter(Phase.EVALUATION)
    steps.fetched()
    steps.batch_there(12, 384)
    steps.enter(Phase.CHECKPOINT)
    clock.now_s += 2
    steps.leave()
    steps.leave()
    clock.now_s += 3
    steps.begin()

    (record,) = steps.records
    assert spent_s(record) == {Phase.FORWARD: 1, Phase.EVALUATION: 2, Phase.REST: 3}


def test_the_end_of_the_data_is_no_step(steps, clock):
    """A call that finds none counts for nothing, and numbers go on."""
    train(steps, clock)
    steps.begin()
    steps.end(is_whole=False)
    train(steps, clock)
    steps.begin()

    assert [record.step for record in steps.records] == [0, 1]


def test_what_cannot_be_told_is_an_error(steps, clock):
    """Several steps in one call, and one whose gradients are not seen."""
    steps.begin()
    steps.batch_there(12, 384)
    with pytest.raises(ValueError, match="steps_per_execution"):
        steps.batch_there(12, 384)
    with pytest.raises(ValueError, match="no gradient came"):
        steps.end(is_whole=True)


@pytest.mark.parametrize("every_s", [-1, float("nan")])
def test_a_time_between_lines_that_is_none_is_refused(every_s):
    """Before the training begins."""
    from evenstep.watch import KerasWatch

    with pytest.raises(ValueError, match=r"KerasWatch\(every_s=.*at least 0.*0 writes no lines"):
        KerasWatch(every_s=every_s)


def test_without_tensorflow_the_error_says_what_to_install():
    """The callback alone needs it: what else the room has does not."""
    code = "import sys; sys.modules['tensorflow'] = None; from evenstep.watch import KerasWatch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert "ImportError: `KerasWatch` needs TensorFlow: `pip install" in done.stderr
