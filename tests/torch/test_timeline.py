"""Where a rank's time goes, on a clock that tells the time it is told, and in a small run."""

from dataclasses import astuple
from functools import partial
from time import perf_counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from evenstep._diagnosis import Phase
from evenstep._private_torch import CollectiveCount
from evenstep.events import StepsAccounted
from evenstep.torch import Balancer, Checkpoint, Runtime

from .test_clock import (
    AbstractClock,
    HostClock,
    Recorder,
    StepMeter,
    Watch,
)


def times(meter, least_s=0.0):
    """The steps that are over by now, with their times."""
    meter.settle()
    return meter.take_times(least_s=least_s)


def told(meter):
    """What the recorder says of the steps that are over, in seconds by phase; no zeros."""
    return [
        (step, {Phase(at).name: us / 1e6 for at, us in enumerate(row) if us})
        for step, row in times(meter)
    ]


@pytest.fixture
def watch():
    return Watch()


def plain_step(meter, watch, *, forward_s=1.0):
    """A step as the conductor takes it, from the hand-out to the next batch."""
    meter.end_fetch()
    meter.begin()
    watch.pass_by(forward_s)
    meter.close_gap(Phase.BACKWARD)
    watch.pass_by(2.0)
    meter.end()
    watch.pass_by(4.0)
    meter.waited()
    watch.pass_by(8.0)
    meter.begin_fetch(in_step=False)
    watch.pass_by(16.0)
    meter.note((partial(meter.meter.timeline.go, Phase.INPUT, at=meter.mark()),))
    watch.pass_by(32.0)


PLAIN = {"FORWARD": 1, "BACKWARD": 2, "REDUCTION": 4, "REST": 8, "PLAN": 16, "INPUT": 32}


def test_each_phase_of_a_plain_step_is_known(watch):
    """From its hand-out to that of the next; the newest has no end yet."""
    meter = Recorder(StepMeter(HostClock(watch)))
    for step in range(2):
        meter.next_step(step)
        plain_step(meter, watch)
    meter.next_step(2)

    assert told(meter) == [(0, PLAIN), (1, PLAIN)]
    assert told(meter) == []


def test_no_step_is_lost_whose_report_is_held(watch):
    """A step's account is read with its report: 32 are reported together at most (`MOST_STEPS`)."""
    meter = Recorder(StepMeter(HostClock(watch)))
    for step in range(31 + 32 + 2):  # left for later, held, the one before, the one under way
        meter.next_step(step)
        plain_step(meter, watch)

    assert [step for step, _ in told(meter)] == list(range(64))


@pytest.mark.parametrize(("least_s", "number"), [(100.0, 2), (126.0, 2), (127.0, 3), (1e9, 32)])
def test_steps_are_told_together_once_they_lasted_so_long_or_are_many(watch, least_s, number):
    """Each lasts 63 s."""
    meter = Recorder(StepMeter(HostClock(watch)))
    for step in range(number):
        meter.next_step(step)
        assert times(meter, least_s=least_s) == []
        plain_step(meter, watch)
    meter.next_step(number)

    assert len(times(meter, least_s=least_s)) == number
    assert times(meter, least_s=least_s) == []


def test_micro_batches_add_up(watch):
    """What comes between one backward and the next forward is own computing, as in its time."""
    meter = Recorder(StepMeter(HostClock(watch)))
    meter.next_step(0)
    meter.begin()
    for _ in range(2):
        watch.pass_by(1.0)
        meter.close_gap(Phase.BACKWARD)
        watch.pass_by(2.0)
        meter.end()
        watch.pass_by(0.5)
        meter.waited()
        meter.open_gap()
    meter.next_step(1)

    assert told(meter) == [(0, {"FORWARD": 2, "BACKWARD": 4, "REDUCTION": 1})]


def test_a_wait_inside_of_computing_is_none_of_it(watch):
    """As in DDP's broadcast of buffers; after it the forward goes on."""
    meter = Recorder(StepMeter(HostClock(watch)))
    meter.next_step(0)
    meter.begin()
    watch.pass_by(1.0)
    begin = meter.clock.mark()
    watch.pass_by(10.0)
    meter.exclude(begin, meter.clock.mark())
    watch.pass_by(1.0)
    meter.next_step(1)

    assert told(meter) == [(0, {"FORWARD": 2, "MEETING": 10})]


class Group:
    """A process group whose collectives are counted by hand."""

    num_collectives = 0

    def _get_sequence_number_for_group(self):
        return self.num_collectives


def test_a_gap_with_a_collective_is_a_meeting(watch):
    """A loss that is averaged for a log before its backward; without one it is own computing."""
    group = Group()
    meter = Recorder(StepMeter(HostClock(watch)), CollectiveCount([group]))
    for step in range(2):
        meter.next_step(step)
        meter.begin()
        watch.pass_by(1.0)
        meter.open_gap()  # the forward is over
        group.num_collectives += step
        watch.pass_by(10.0)
        meter.close_gap(Phase.BACKWARD)
        watch.pass_by(2.0)
    meter.next_step(2)

    assert told(meter) == [
        (0, {"FORWARD": 11, "BACKWARD": 2}),
        (1, {"FORWARD": 1, "MEETING": 10, "BACKWARD": 2}),
    ]


def test_of_blocks_in_each_other_the_outermost_counts(watch):
    """A mean inside of an evaluation is evaluation; after it the rest goes on."""
    meter = Recorder(StepMeter(HostClock(watch)))
    meter.next_step(0)
    with meter.block(Phase.EVALUATION):
        watch.pass_by(1.0)
        with meter.block(Phase.MEAN):
            watch.pass_by(2.0)
        watch.pass_by(4.0)
    watch.pass_by(8.0)
    meter.next_step(1)

    assert told(meter) == [(0, {"EVALUATION": 7, "REST": 8})]


def test_computing_inside_of_an_optimizer_is_own_computing(watch):
    """LBFGS runs forwards and backwards in its step; what it does between them is its own."""
    meter = Recorder(StepMeter(HostClock(watch)))
    meter.next_step(0)
    with meter.block(Phase.OPTIMIZER):
        watch.pass_by(1.0)
        meter.open_gap()
        watch.pass_by(2.0)
        meter.waited()
        watch.pass_by(4.0)
    watch.pass_by(8.0)
    meter.next_step(1)

    assert told(meter) == [(0, {"OPTIMIZER": 5, "FORWARD": 2, "REST": 8})]


def test_a_block_ends_with_its_step(watch):
    """An evaluation whose iterator was left alone; its late end changes nothing."""
    meter = Recorder(StepMeter(HostClock(watch)))
    meter.next_step(0)
    left = meter.block(Phase.EVALUATION)
    left.__enter__()
    watch.pass_by(1.0)
    meter.next_step(1)
    meter.open_gap()
    meter.waited()
    watch.pass_by(2.0)
    left.__exit__(None, None, None)
    watch.pass_by(4.0)
    meter.next_step(2)

    assert told(meter) == [(0, {"EVALUATION": 1}), (1, {"REST": 6})]


def test_where_computing_and_waiting_mix_it_goes_to_the_rest():
    """As with FSDP2 in collectives of the script's own."""
    watch = Watch()
    meter = Recorder(StepMeter(HostClock(watch), mixes=True))
    for step in range(2):
        meter.next_step(step)
        meter.begin()
        watch.pass_by(1.0)
        meter.close_gap(Phase.BACKWARD)
        watch.pass_by(2.0)
        meter.end()
        watch.pass_by(4.0)
        meter.waited()
    meter.next_step(2)
    expected = {"REST": 3, "REDUCTION": 4}

    assert told(meter) == [(0, expected), (1, expected)]


def test_a_device_is_not_waited_for(watch):
    """Its steps are told once it has come to their ends, in order."""
    reached_s = 0.0

    class Device(AbstractClock):
        """One that runs behind."""

        mark = watch

        def seconds(self, begin, end):
            return end - begin if end <= reached_s else None

        def wait(self, mark):
            raise AssertionError("nothing waits for a device")

    meter = Recorder(StepMeter(Device()))
    for step in range(3):
        meter.next_step(step)
        meter.open_gap()
        watch.pass_by(1.0)
    before = told(meter)
    reached_s = 1.0
    first = told(meter)
    meter.next_step(3)
    reached_s = 3.0

    assert (before, first) == ([], [(0, {"FORWARD": 1})])
    assert told(meter) == [(1, {"FORWARD": 1}), (2, {"FORWARD": 1})]


def test_a_step_in_which_the_clock_went_back_is_left_out(watch):
    """Rather than told with times that cannot be."""
    meter = Recorder(StepMeter(HostClock(watch)))
    for step in range(3):
        meter.next_step(step)
        watch.pass_by(5.0)
        meter.open_gap()
        watch.pass_by(-1.0 if step == 0 else 1.0)

    assert [step for step, _ in told(meter)] == [1]


def test_an_optimizer_is_heard_of_until_the_end(watch):
    """By torch's own hooks; those of a recorder that is closed, or gone, are silent."""
    parameter = torch.nn.Parameter(torch.ones(2))

    class Slow(torch.optim.SGD):
        """One that takes three seconds."""

        def step(self, closure=None):
            watch.pass_by(3.0)
            return super().step(closure)

    optimizer = Slow([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    meter = Recorder(StepMeter(HostClock(watch)))
    for step in range(2):
        meter.next_step(step)
        watch.pass_by(1.0)
        optimizer.step()
        if step == 0:
            meter.close()
    meter.next_step(2)

    assert told(meter) == [(0, {"REST": 1, "OPTIMIZER": 3}), (1, {"REST": 4})]
    del meter
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch's own imports
def test_a_compiled_optimizer_has_no_hook_in_its_graph(watch):
    """It compiles as it would without one, and its time goes to the rest."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    meter = Recorder(StepMeter(HostClock(watch)))
    meter.next_step(0)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        compiled()
        watch.pass_by(1.0)
    meter.next_step(1)

    assert parameter.tolist() == [0.0, 0.0]
    assert told(meter) == [(0, {"REST": 2})]


class Read(torch.utils.data.Dataset):
    """Samples, and how long reading those of all steps but the first took."""

    def __init__(self):
        self.read_s = 0.0

    def __len__(self):
        return 24

    def __getitem__(self, index):
        began_s = perf_counter()
        sample = torch.randn(256, 256).mean(dim=0)
        self.read_s += perf_counter() - began_s
        return sample


def test_a_run_accounts_for_its_time(tmp_path):
    """Each part in its place, all of them the wall time; an epoch's end is in its last step."""
    heard = []
    model = torch.nn.Linear(256, 1)
    optimizer = torch.optim.Adam(model.parameters())
    runtime = Runtime(line_every=None, hooks=(heard.append,))
    with Balancer(runtime=runtime) as balancer:
        data = Read()
        model, loader = balancer.prepare(model, DataLoader(data, batch_size=4))
        held_out = balancer.prepare_eval(DataLoader(TensorDataset(torch.randn(24, 256))))
        checkpoint = Checkpoint(tmp_path, model=model, optimizer=optimizer, balancer=balancer)
        for epoch in range(3):
            for step, x in enumerate(loader):
                data.read_s *= epoch > 0 or step > 0  # the input of the first is in no step
                model(x).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                for (x,) in held_out:
                    model(x)
            checkpoint.save(epoch + 1)
    accounts = [event for event in heard if isinstance(event, StepsAccounted)]
    parts = np.array([astuple(one)[3:] for one in accounts])
    whole = {name: sum(sum(getattr(one, name)) for one in accounts) for name in ALL}

    assert sum(one.num_steps for one in accounts) == 17  # the last of 18 has no end
    np.testing.assert_allclose(parts.sum(axis=1), [one.wall_s for one in accounts], rtol=1e-9)
    assert whole["input_s"] > data.read_s
    assert all(whole[name] > 0 for name in ALL - {"waiting_s"}), whole
    assert whole["waiting_s"] == 0  # alone


ALL = {name for name in StepsAccounted.__slots__ if name.endswith("_s")}
