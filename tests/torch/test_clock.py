"""What counts as a rank's own time, on a clock that tells the time it is told."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from evenstep._diagnosis import Phase, StepClues
from evenstep._exchange._message_kinds import TimesReport
from evenstep._private_torch import CollectiveCount
from evenstep._torch_clock import AbstractClock, AcceleratorClock, HostClock
from evenstep.torch import Balancer
from evenstep.torch._step._marks import Recorder, StepMeter
from evenstep.torch._step._reporter import CompileWatch, Reporter, StepState


class Watch:
    """A clock that stands still between calls of ``pass_by``."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def pass_by(self, seconds):
        self.now_s += seconds


def taken(recorder):
    """The step's time, as the report has it."""
    found = []
    recorder.note((lambda: found.append(recorder.meter.take()),))
    recorder.settle()
    return found[0]


@pytest.fixture
def watch():
    return Watch()


def test_waits_are_left_out(watch):
    """Those inside, those after earlier backwards of the step; what follows the last is past it."""
    meter = Recorder(StepMeter(HostClock(watch)))
    meter.begin()
    watch.pass_by(1.0)
    begin = meter.clock.mark()
    watch.pass_by(10.0)
    meter.exclude(begin, meter.clock.mark())
    for _ in range(2):
        watch.pass_by(1.0)
        meter.end()
        watch.pass_by(100.0)
        meter.waited()

    assert taken(meter).seconds() == pytest.approx(3.0)


def test_the_last_gradient_ends_a_backward_that_waited_inside(watch):
    """And the next backward's end is its own again."""
    meter = Recorder(StepMeter(HostClock(watch)))
    meter.begin()
    watch.pass_by(1.0)
    meter.grad_ready()
    watch.pass_by(10.0)
    meter.end()
    meter.waited()
    first = taken(meter).seconds()
    watch.pass_by(1.0)
    meter.end()

    assert first == pytest.approx(1.0)
    assert taken(meter).seconds() == pytest.approx(2.0)


def test_a_claim_waits_for_the_device():
    """One that runs behind would claim all there is for work that it has not begun."""
    watch, waits = Watch(), []

    class Device(AbstractClock):
        """One that is done when somebody waits for it."""

        mark = watch
        seconds = HostClock.seconds

        def wait(self, mark):
            waits.append(mark)

    meter = Recorder(StepMeter(Device()))
    meter.begin()
    watch.pass_by(1.0)
    meter.end()
    meter.waited()
    watch.pass_by(1.0)
    meter.pause()
    meter.resume()

    assert waits == [2.0]


def test_what_cannot_be_told_apart_has_no_time(watch):
    """FSDP2 with collectives of the script: rather nothing than a time that is mostly waiting."""
    meter = Recorder(StepMeter(HostClock(watch), mixes=True))
    meter.begin()
    watch.pass_by(1.0)
    meter.end()

    assert taken(meter) is None


class Queue:
    """A device that does work in order, some time after it was handed over."""

    def __init__(self):
        self.handed_over_s = self.done_s = 0.0

    def record(self, device):
        return Event(self, self.handed_over_s)


class Event:
    def __init__(self, queue, at_s):
        self.queue, self.at_s = queue, at_s

    def query(self):
        return self.at_s <= self.queue.done_s

    def synchronize(self):
        self.queue.done_s = max(self.queue.done_s, self.at_s)

    def elapsed_time(self, end):
        assert self.query(), "torch tells no time between events that are not both reached"
        assert end.query()
        return 1e3 * (end.at_s - self.at_s)


def test_an_accelerator_is_timed_by_its_own_events():
    """By when work is done, not when it is handed over; and nothing waits for that unasked."""
    queue = Queue()
    meter = Recorder(StepMeter(AcceleratorClock(torch.device("xpu"), queue.record)))
    meter.begin()
    queue.handed_over_s += 3.0
    meter.end()
    time = taken(meter)
    before = time.seconds()
    queue.done_s = 3.0

    assert before is None
    assert time.seconds() == pytest.approx(3.0)


def test_a_device_that_cannot_be_timed_is_refused():
    """With why, and with what to do; the host's clock would tell how long handing over takes."""
    model = torch.nn.Linear(1, 1, device="meta")

    with pytest.raises(ValueError, match=r"got meta: .* `EVENSTEP=off`"):
        Balancer().prepare(model, DataLoader(range(4)))


class Loop:
    """A step on a clock that is set by hand, and collectives that are counted by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_collectives = 0
        clock = HostClock(lambda: self.now_s)
        self.groups = [self]
        self.meter = Recorder(StepMeter(clock), CollectiveCount(self.groups))
        self.meter.next_step(0)
        self.meter.begin()

    def _get_sequence_number_for_group(self) -> int:
        return self.num_collectives

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
        time = taken(self.meter)
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


def test_a_process_group_that_is_made_in_a_step_is_noticed_once() -> None:
    """Making it is a collective, and later ones on it count as on any other."""
    loop = Loop()
    loop.compute_s()
    assert not loop.meter.has_others
    loop.meter.open_gap()
    loop.groups.append(loop)
    loop.meter.close_gap()
    assert loop.meter.has_others
    loop.meter.open_gap()
    loop.num_collectives += 1
    loop.go(7.0)
    assert loop.compute_s() == 4.0


def test_one_that_ends_in_a_later_step_takes_nothing_from_it() -> None:
    loop = Loop()
    left = loop.meter.block(Phase.EVALUATION)
    left.__enter__()
    loop.go(5.0)
    loop.meter.next_step(1)
    loop.meter.begin()
    loop.go(0.5)
    left.__exit__(None, None, None)
    assert loop.compute_s() == 2.5


@pytest.mark.parametrize("is_late", [True, False])
def test_a_device_is_asked_on_the_thread_that_trains(is_late):
    """A report may be sent by another one, whose question would break a graph's capture."""
    watch, asked, sent = Watch(), [], []

    class Clock(AbstractClock):
        """One that notes what it is asked."""

        mark = watch

        def seconds(self, begin, end):
            asked.append(end)
            return end - begin

        def wait(self, mark):
            """Come back at once."""

    line = SimpleNamespace(report=lambda step, made, **_: sent.append(made))  # unasked
    Clock.is_late = is_late
    meter = Recorder(StepMeter(Clock()))
    reporter = Reporter(line, meter, CompileWatch(), exact=False)
    meter.begin()
    watch.pass_by(2.0)
    meter.end()
    reporter.send(StepState(3, 4, 8, 0.0, None, has_begun=True))
    before = len(asked)
    (*_, told) = sent[0]()

    assert told.step == 3
    assert [report.compute_s for report in told.reports] == [2.0]
    assert (len(asked) == before) is is_late
    assert (before > 0) is is_late


class Straight(list):
    """Makes a report at once, and keeps it."""

    def report(self, step, made, **_):
        self.extend(made())


class Clues:
    """Notices every step, and compiles nothing."""

    garbage = compiling = SimpleNamespace(total_s=0.0)

    def __init__(self):
        self.begun = []

    def begin_step(self, step, *_):
        self.begun.append(step)

    def take(self, step):
        return (StepClues(size=step) if step < self.begun[-1] else None), None


def test_what_was_noticed_in_a_step_goes_with_its_times(watch):
    sent, meter = Straight(), Recorder(StepMeter(HostClock(watch)), clues=Clues())
    reporter = Reporter(sent, meter, CompileWatch(), exact=False)
    for step in range(3):
        meter.next_step(step)
        meter.begin()
        watch.pass_by(1.0)
        meter.end()
        reporter.send(StepState(step, 4, 8, 0.0, None, has_begun=True))
    kinds = [(type(one).__name__, one.step) for one in sent]
    noticed = [one.clues.size for one in sent if isinstance(one, TimesReport)]

    assert kinds == [
        ("StepReports", 0),
        *(("TimesReport", 0), ("StepReports", 1)),
        *(("TimesReport", 1), ("StepReports", 2)),
    ]
    assert noticed == [0, 1]


def test_a_model_on_a_stream_of_its_own_is_timed():
    """The loop's stream has no work, and comes to its marks at once, the model's a step later."""
    loop, model, sent = Queue(), Queue(), Straight()
    current = [loop]
    clock = AcceleratorClock(torch.device("xpu"), lambda device: current[-1].record(device))
    reporter = Reporter(sent, meter := Recorder(StepMeter(clock)), CompileWatch(), exact=False)
    for step in range(3):
        loop.handed_over_s = loop.done_s = 3.0 * step
        meter.next_step(step)
        meter.begin()
        current.append(model)
        model.handed_over_s += 3.0
        meter.end()
        current.pop()
        reporter.send(StepState(step, 4, 8, 0.0, None, has_begun=True))
        model.done_s = 3.0 * step
    (report,) = (report for one in sent for report in getattr(one, "reports", ()))

    assert (report.step, report.compute_s, report.fault) == (0, 3.0, "")


def test_notes_that_nobody_works_out_stay_few_and_end_no_training(watch, caplog):
    """The channel's thread may be stopped; a fault in a note is logged, and measuring ends."""
    meter = Recorder(StepMeter(HostClock(watch)))
    reporter = Reporter(Straight(), meter, CompileWatch(), exact=False)
    meter.note((lambda: 1 / 0,))
    most = 0
    for step in range(3000):
        meter.next_step(step)
        reporter.begin_step()
        meter.begin()
        meter.end()
        most = max(most, len(meter.notes))

    assert 1000 < most < 5000
    assert "ZeroDivisionError" in caplog.text
