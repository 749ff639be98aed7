"""What a rank's thread carries to rank 0, and how often."""

import pytest

from evenstep._diagnosis import Phase, StepClues
from evenstep._run._host_reader import HostReader
from evenstep.watch._courier import Courier, ends_of
from evenstep.watch._mail import RankHello, RankReader
from evenstep.watch._start_watch import WatchSettings
from evenstep.watch._step_records import StepRecord

from .stores import DictStore


class Steps:
    """Steps that are all over."""

    def __init__(self, num_steps):
        self.step = num_steps
        spent_us = (1000,) * len(Phase)
        self.left = [StepRecord(step, 1, spent_us, StepClues(), 2) for step in range(num_steps)]

    def take_records(self):
        taken, self.left = self.left, []
        return taken


class SizedStore(DictStore):
    """Notes how large keys are."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def set(self, key, value):
        super().set(key, value)
        self.sizes.append(len(value))


def told_of(num_steps, every_s=10.0):
    """What rank 1 tells rank 0 of that many steps at its end, and the sizes of its keys."""
    store = SizedStore()
    ends = ends_of(store, 1, 2, WatchSettings(every_s))
    hello, host = RankHello("ann", "cpu"), HostReader()
    Courier(Steps(num_steps), hello, host, ends, on_fault=print).close("DDP", (), own_s=float)
    return [told for _, told in RankReader(store, range(1, 2)).read()], store.sizes


@pytest.mark.parametrize("num_steps", [0, 50, 64, 65, 200, 320])
def test_steps_come_in_keys_of_six_kilobytes_at_most(num_steps):
    """All of them, in order; the look at the machine and the end come with the last key."""
    told, sizes = told_of(num_steps)

    assert [record.step for one in told for record in one.records] == list(range(num_steps))
    assert [one.is_last for one in told] == [False] * (len(told) - 1) + [True]
    assert [one.host is not None for one in told] == [one.is_last for one in told]
    assert len(sizes) <= max(1, -(-num_steps // 64))
    assert max(sizes) <= 6000


@pytest.mark.parametrize(("every_s", "num_keys"), [(10.0, 5), (2.0, 1)])
def test_short_steps_are_summed(every_s, num_keys):
    """Of a thousand a tenth of a second or so, in a key a second; none is left out."""
    told, _ = told_of(1024, every_s)

    assert len(told) <= num_keys
    assert sum(record.num_steps for one in told for record in one.records) == 1024


@pytest.mark.parametrize(
    ("line_s", "every_s"),
    [(0.0, 5.0), (0.5, 1.0), (2.0, 1.0), (6.0, 3.0), (10.0, 5.0), (60.0, 5.0)],
)
def test_it_tells_twice_between_two_lines(line_s, every_s):
    """But no more than once a second, and every five seconds at least."""
    for rank in (0, 1):
        assert ends_of(DictStore(), rank, 2, WatchSettings(line_s)).every_s == every_s
