"""Steps are timed for a bounded time, whatever they do; the reference and a step of one's own."""

import inspect
import sys

import pytest
import torch

from evenstep.doctor._examination import StageLine
from evenstep.doctor._timed_step import check_step, load_step, reference, sizes_for, time_steps


class FakeClock:
    """Time passes when a step takes it."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def timed(seconds_of, sizes=(8, 32), **more):
    """What is timed of steps that take what a function of their size says; and the clock."""
    clock = FakeClock()

    def step(size):
        clock.now_s += seconds_of(size)

    return time_steps(3, lambda: step, sizes, None, clock=clock, **more), clock


def test_both_sizes_are_timed_in_turn():
    """As many of each, one after the other, each as long as it takes."""
    pace, _ = timed(lambda size: 0.01 + size / 100, budget_s=4.0)

    assert set(pace.sizes) == {8, 32}
    assert pace.sizes[:4] == (8, 32, 8, 32)
    assert pace.seconds[:2] == pytest.approx((0.09, 0.33))
    assert (pace.rank, pace.error) == (3, "")


@pytest.mark.parametrize("step_s", [1e-5, 0.003, 0.1, 0.7])
def test_the_budget_is_kept(step_s):
    """Up to the last measurement and the warming up, for short and long steps."""
    pace, clock = timed(lambda size: step_s, budget_s=4.0)

    assert clock.now_s <= 4.0 + max(1.0, 6 * step_s)
    assert len(pace.seconds) >= 4


def test_a_very_long_step_is_timed_once_a_size():
    """A time is better than none."""
    pace, _ = timed(lambda size: 100.0, budget_s=4.0)

    assert pace.sizes == (8, 32)
    assert pace.seconds == (100.0, 100.0)


def test_short_steps_are_timed_several_in_a_row():
    """A stop of 0.1 s now and then, as of a quota, counts in the mean: it would be passed over."""
    number = 0

    def stopped(size):
        nonlocal number
        number += 1
        return 0.01 + 0.1 * (number % 10 == 0)

    pace, _ = timed(stopped, budget_s=4.0)

    assert sorted(pace.seconds)[len(pace.seconds) // 2] == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("error", [KeyError("no 'x'"), SystemExit(3), RuntimeError("a\nb")])
def test_an_error_of_the_step_is_told(error):
    """With its type, in one line; what was timed before is kept."""
    calls = []

    def seconds_of(size):
        calls.append(size)
        if len(calls) > 100:
            raise error
        return 0.5

    pace, _ = timed(seconds_of, budget_s=1000.0)

    assert pace.error.startswith(type(error).__name__)
    assert "\n" not in pace.error
    assert len(pace.sizes) == len(pace.seconds) > 10


def test_an_error_of_loading_is_told():
    """There are no times then."""

    def load():
        raise ImportError("no module")

    pace = time_steps(0, load, (1, 2), None)

    assert (pace.seconds, pace.error) == ((), "ImportError: no module")


def test_what_a_quota_held_back_is_a_share(tmp_path):
    """From the kernel's own count, over the time of timing."""
    stat = tmp_path / "cpu.stat"
    stat.write_text("throttled_usec 1000\n")
    clock = FakeClock()

    def step(size):
        clock.now_s += 1.0
        stat.write_text(f"throttled_usec {1000 + int(clock.now_s * 250_000)}\n")

    pace = time_steps(0, lambda: step, (1, 2), stat, clock=clock, budget_s=10.0)

    assert pace.throttled_share == pytest.approx(0.25)


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_quota_held_back_on_several_cpus_counts_once(tmp_path, version):
    """The kernel sums over them: 4 threads that are held back for 3 % each make 12 % there."""
    clock, stat = FakeClock(), tmp_path / "cpu.stat"

    def step(size):
        clock.now_s += 1.0
        used, held = int(clock.now_s * 3_880_000), int(clock.now_s * 120_000)
        if version == 2:
            stat.write_text(f"usage_usec {used}\nthrottled_usec {held}\n")
            return
        stat.write_text(f"throttled_time {held}000\n")
        (tmp_path / "cpuacct.usage").write_text(f"{used}000\n")

    pace = time_steps(0, lambda: step, (1, 2), stat, clock=clock, budget_s=10.0)

    assert pace.throttled_share == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("total", "ranks", "sizes"), [(64, 2, (8, 32)), (2, 2, (1, 2)), (7, 7, (1, 2)), (9, 2, (1, 4))]
)
def test_two_sizes_are_timed_at_every_global_batch(total, ranks, sizes):
    """One alone would not tell a fixed cost."""
    assert sizes_for(total, ranks) == sizes


def test_the_reference_does_the_same_everywhere():
    """The same layers and numbers of samples, with nothing left of a step."""
    step = reference(torch.device("cpu"))
    step(2)
    step(3)
    model = inspect.getclosurevars(step).nonlocals["model"]

    assert all(each.grad is None for each in model.parameters())


STEP = "calls = []\ndef step(num_samples):\n    calls.append(num_samples)\nNUMBER = 3\n"


def test_a_step_of_one_s_own_is_loaded(tmp_path, monkeypatch):
    """By file, or by module."""
    (tmp_path / "own_step_of_file.py").write_text(STEP)
    (tmp_path / "own_step_of_module.py").write_text(STEP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # what loading adds is taken away again
    for name in (f"{tmp_path}/own_step_of_file.py:step", "own_step_of_module:step"):
        load_step(name)(5)

    assert sys.modules["own_step_of_file"].calls == [5]
    assert sys.modules["own_step_of_module"].calls == [5]


@pytest.mark.parametrize("name", ["train.py", "train:", ":step", "train:a b", ""])
def test_a_name_of_another_form_is_refused(name):
    """Before a process is started, with an example."""
    with pytest.raises(ValueError, match=r"MODULE:FUNCTION or FILE:FUNCTION.*train.py:step"):
        check_step(name)


def test_a_step_that_is_not_there_is_refused(tmp_path):
    """The file, or the function in it."""
    (tmp_path / "no_step.py").write_text(STEP)
    with pytest.raises(ValueError, match="name a file that is there"):
        load_step(f"{tmp_path}/gone.py:step")
    for name in ("other", "NUMBER"):
        with pytest.raises(ValueError, match="name a function"):
            load_step(f"{tmp_path}/no_step.py:{name}")


def test_progress_is_shown_from_two_seconds_on(capsys):
    """A line a stage."""
    clock = FakeClock()
    line = StageLine(True, clock=clock)
    line.say("waiting")
    clock.now_s = 2.5
    line.say("measuring links")
    line.say("measuring links")

    assert capsys.readouterr().err == "evenstep doctor: measuring links\n"


def test_one_rank_speaks_for_all(capsys):
    """The others are silent."""
    clock = FakeClock()
    line = StageLine(False, clock=clock)
    clock.now_s = 9.0
    line.say("timing steps")

    assert capsys.readouterr().err == ""
