"""An emulated worker takes its time, and the demo says and draws what was recorded."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console

from evenstep.demo._run_demo import report, save_picture, summarise
from evenstep.demo._worker import GPT, DemoJob, DemoOutcome, loss_of, standard_library
from evenstep.events import StepMeasured


class Clock:
    """Each look at it takes a millisecond, which stands for the real computing."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        self.now_s += 1e-3
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def gradients(monkeypatch, seconds_per_sample):
    """The gradients of a step with five samples, how long it took, and how often it was late."""
    torch.manual_seed(0)
    clock = Clock()
    monkeypatch.setattr("evenstep.demo._worker.time", clock)
    gpt, tokens = GPT(), torch.randint(0, 256, (5, 9))
    gpt.seconds_per_sample = seconds_per_sample
    loss_of(gpt, tokens).backward()
    return [parameter.grad for parameter in gpt.parameters()], clock.now_s, gpt.num_late


def test_a_step_lasts_as_long_as_its_samples_ask(monkeypatch):
    """Five samples at 40 ms; the gradient is bit for bit that of a worker that only computes."""
    emulated, took_s, num_late = gradients(monkeypatch, 0.04)
    real, _, was_late = gradients(monkeypatch, 1e-9)

    assert 0.2 <= took_s < 0.21
    assert (num_late, was_late) == (0, 1)  # what did not fit is counted
    assert all(torch.equal(one, other) for one, other in zip(emulated, real, strict=True))


def test_the_wait_comes_after_the_other_gradients():
    """DDP can average what is ready while the worker still takes its time."""
    gpt, order = GPT(), []
    weight = gpt.blocks.layers[0].linear1.weight
    weight.register_hook(lambda _: order.append(gpt.num_late))
    loss_of(gpt, torch.randint(0, 256, (1, 9))).backward()

    assert order == [0]
    assert gpt.num_late == 1


def test_no_byte_sees_a_later_one():
    """Changing the last byte leaves all earlier predictions as they are."""
    torch.manual_seed(0)
    gpt, tokens = GPT(), torch.randint(0, 256, (3, 8))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    before, after = gpt(tokens), gpt(changed)

    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_every_machine_has_enough_text():
    """The standard library holds more than the longest demo reads."""
    assert len(standard_library()) > 80 * 24 * 8


OVERHEAD_S, PER_SAMPLE_S = 0.01, 0.004
SPEEDS = (1.0, 0.5, 1 / 3, 1 / 6)
EQUAL, BEST = (24, 24, 24, 24), (48, 24, 16, 8)
OUTCOME = DemoOutcome(20, PER_SAMPLE_S, 0, [2.0 / (step + 1) for step in range(20)])


def steps_of(*sizes, speeds=SPEEDS):
    """Twenty steps in which every worker keeps exactly to its speed."""
    steps = []
    for at in range(20):
        before_s = steps[-1].makespan_s + OVERHEAD_S if steps else None
        steps.append(step_of(at, sizes[min(at, len(sizes) - 1)], speeds, before_s))
    return steps


def step_of(step, sizes, speeds, before_s):
    """A step, which tells what the one before it took in all."""
    compute_s = tuple(PER_SAMPLE_S * b / v for b, v in zip(sizes, speeds, strict=True))
    makespan_s, zeros = max(compute_s), (0.0,) * len(sizes)
    idle_s = tuple(makespan_s - own_s for own_s in compute_s)
    share = sum(idle_s) / (len(sizes) * makespan_s)
    times = (compute_s, zeros, idle_s, makespan_s, share, None, None, before_s)
    return StepMeasured(step, 0, sizes, *times)


@pytest.fixture
def summary():
    other = replace(OUTCOME, loss=[loss + 0.003 for loss in OUTCOME.loss])
    job = DemoJob("auto", SPEEDS, 20)
    return summarise(steps_of(EQUAL), steps_of(EQUAL, BEST), OUTCOME, other, job)


def test_the_limit_is_the_batch_over_the_summed_speeds(summary):
    """Averaging gradients and all else that a step takes counts against it."""
    assert summary.limit_s == pytest.approx(96 * PER_SAMPLE_S / 2)
    assert summary.share_of_limit == pytest.approx(0.192 / (0.192 + OVERHEAD_S))


def test_the_heading_is_the_ratio_of_the_steps_below_it(summary):
    """The first steps, which are equal in both runs, count in the whole times."""
    equal_s, balanced_s = 24 * PER_SAMPLE_S * 6 + OVERHEAD_S, 48 * PER_SAMPLE_S + OVERHEAD_S

    assert summary.speed_up == pytest.approx(equal_s / balanced_s)
    assert summary.equal.total_s == pytest.approx(20 * equal_s)
    assert summary.balanced.total_s == pytest.approx(equal_s + 19 * balanced_s)


def test_half_of_the_workers_time_is_lost_to_equal_shares(summary):
    """Workers at 1, 1/2, 1/3 and 1/6 are busy 1/6, 1/3, 1/2 and all of an equal step."""
    assert summary.equal.idle_share == pytest.approx(0.5)
    assert summary.balanced.idle_share == 0


def test_loss_curves_are_compared_step_by_step(summary):
    """The largest difference counts."""
    assert summary.loss_difference == pytest.approx(0.003)


def test_the_figures_are_plain_data(summary):
    """They go into a file for other programs."""
    assert json.loads(json.dumps(asdict(summary)))["num_steps"] == 20


def test_the_report_has_the_sentence_with_the_limit(summary):
    """What a person came for stands in the first line; busy machines are named."""
    console = Console(file=io.StringIO(), width=100)
    console.print(report(summary), report(replace(summary, late_share=0.2)), soft_wrap=True)
    text, busy = console.file.getvalue().split("Result")[1:]

    assert "2.9 times as fast, at 95% of what is physically possible" in text
    assert "48 + 24 + 16 + 8" in text
    assert "Physical limit 192 ms" in text
    assert "too busy" not in text
    assert "In 20% of the steps this machine was too busy" in busy


@pytest.mark.parametrize("speeds", [SPEEDS, (1.0, 0.25), (1.0, 0.5) * 5])
def test_any_number_of_workers_can_be_drawn(tmp_path, speeds):
    """A PNG large enough for a page; more workers than colours take them again."""
    steps = steps_of((24,) * len(speeds), speeds=speeds)
    told = summarise(steps, steps, OUTCOME, OUTCOME, DemoJob("auto", speeds, 20))
    save_picture(tmp_path / "demo.png", told, speeds)

    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "demo.png").stat().st_size > 20_000
