"""Marks on several streams of one device, which are not reached in the order they were set."""

import torch

from evenstep.torch._step._clock import AcceleratorClock
from evenstep.torch._step._compile_watch import CompileWatch
from evenstep.torch._step._meter import StepMeter
from evenstep.torch._step._reporter import Reporter, StepUnderWay

from .test_clock import Queue


def test_a_model_on_a_stream_of_its_own_is_timed():
    """The loop's stream has no work, and comes to its marks at once, the model's a step later."""
    loop, model = Queue(), Queue()
    current, sent = [loop], []

    class Straight:
        """Makes a report at once."""

        def report(self, step, made, *, is_urgent=False):
            sent.extend(made())

    clock = AcceleratorClock(torch.device("xpu"), lambda device: current[-1].record(device))
    meter = StepMeter(clock)
    reporter = Reporter(Straight(), meter, CompileWatch(), (), exact=False)
    for step in range(3):
        loop.handed_over_s = loop.done_s = 3.0 * step
        meter.timeline.begin(step)
        meter.begin()
        current.append(model)
        model.handed_over_s += 3.0
        meter.end()
        current.pop()
        reporter.send(StepUnderWay(step, 4, 8, 0.0, None, has_begun=True))
        model.done_s = 3.0 * step
    reports = [report for one in sent for report in getattr(one, "reports", ())]

    assert [(report.step, report.compute_s, report.fault) for report in reports] == [(0, 3.0, "")]
