"""The progress line: what it says of steps, savings, faults and waiting, and what never."""

import io
import logging
from dataclasses import fields, replace

import pytest

from evenstep._telemetry import FaultLog, ProgressLine
from evenstep.events import (
    BalancingStopped,
    MemoryCapped,
    RunEnded,
    RunStarted,
    StepsAccounted,
    WaitingDiagnosed,
)

from .steps import measured


def test_the_line_says_whether_it_pays():
    """Sizes, what a step takes, computing in it, and the saving, as means since the last line."""
    stream = io.StringIO()
    line = ProgressLine(stream, 2)
    walls = None, 0.4, 0.5, 0.6, 0.7
    for step, (makespan_s, wall_s) in enumerate(zip((0.3, 0.2, 0.25, 0.35, 9), walls, strict=True)):
        line(measured(step, makespan_s=makespan_s, wall_s=wall_s))

    assert stream.getvalue().splitlines() == [
        "evenstep step 1: batch 40 24, step 0.4 s, computing 0.3 s of it (idle 5 %), "
        "equal split 0.6 s: saves 33 %",
        "evenstep step 3: batch 40 24, step 0.55 s, computing 0.225 s of it (idle 5 %), "
        "equal split 0.825 s: saves 33 %",
    ]


def test_the_line_counts_what_balancing_does_not_touch():
    """Waiting for data, say: of a step of 78 ms, computing 19 in place of 26 saves 8 %, not 26."""
    stream = io.StringIO()
    line = ProgressLine(stream, 3)
    for step in range(3):
        line(
            measured(step, makespan_s=0.0194, equal_split_s=0.0262, wall_s=0.078 if step else None)
        )

    assert "step 0.078 s, computing 0.0194 s of it" in stream.getvalue()
    assert "equal split 0.0848 s: saves 8 %" in stream.getvalue()


def test_where_costs_are_known_the_line_says_what_each_would_save_alone():
    """Of a step of 1.2 s at the equal split: speeds save 0.3 s, lengths 0.6 s."""
    stream = io.StringIO()
    line = ProgressLine(stream, 2)
    alone = {"speed_split_s": 0.6, "cost_split_s": 0.3}
    for step in range(2):
        told = measured(step, makespan_s=0.2, equal_split_s=0.9, wall_s=step / 2 or None)
        line(replace(told, **alone))

    text = "equal split 1.2 s: saves 58 % (by speed alone 25 %, by length alone 50 %)"
    assert text in stream.getvalue()


def test_with_equal_sizes_the_line_says_what_balancing_would_save():
    """Of the whole step: best 0.19 in place of 0.3 s of computing, in steps of 0.4 s."""
    stream = io.StringIO()
    line = ProgressLine(stream, 3)
    line(RunStarted(2, 64, 10, "Equal()", ("a", "b"), ("cpu", "cpu")))
    for step in range(3):
        line(measured(step, makespan_s=0.3, wall_s=0.4 if step else None))
    assert stream.getvalue().endswith(", best split 0.29 s: would save 27 %\n")


def account(step, **parts):
    """Where the time of a step of two workers went."""
    zeros = {field.name: (0.0, 0.0) for field in fields(StepsAccounted)[3:]}
    wall_s = tuple(map(sum, zip(*parts.values(), strict=True)))
    return StepsAccounted(step, 1, wall_s, **(zeros | parts))


def test_the_line_says_where_the_time_went():
    """Of all workers since the last line; little parts are left out."""
    stream = io.StringIO()
    line = ProgressLine(stream, 1)
    line(account(0, forward_s=(1.0, 3.0), waiting_s=(2.0, 0.0), rest_s=(0.0, 0.01)))
    line(account(1, forward_s=(1.0, 3.0), evaluation_s=(10.0, 10.0)))
    line(measured(1))
    line(measured(2))

    first, second = stream.getvalue().splitlines()
    assert first.endswith("; time: forward 27 %, waiting 7 %, evaluation 67 %")
    assert "time" not in second


def test_idle_is_time_and_no_mean_of_shares():
    """A long step in which half is idle outweighs ten short ones in which nothing is."""
    stream = io.StringIO()
    line = ProgressLine(stream, 11)
    line(replace(measured(0, makespan_s=1.0), idle_s=(0.0, 1.0), idle_share=0.5))
    for step in range(1, 11):
        line(replace(measured(step, makespan_s=0.1), idle_s=(0.0, 0.0), idle_share=0.0))

    assert "computing 0.182 s (idle 25 %)" in stream.getvalue()


def test_the_line_says_that_balancing_is_off():
    """As long as the run lasts, not only when it happened."""
    stream = io.StringIO()
    line = ProgressLine(stream, 1)
    line(measured(0))
    line(BalancingStopped(0, 1, "Reader failed (OSError: no)", ""))
    for step in (1, 2):
        line(measured(step))

    off = ["balancing is off" in text for text in stream.getvalue().splitlines()]
    assert off == [False, True, True, True]


@pytest.mark.parametrize(("unit", "words"), [("samples", "90 samples"), ("size", "a size of 90")])
def test_the_line_says_what_fits_and_in_which_unit(unit, words):
    """Where samples are assigned by cost, it is no number of samples."""
    stream = io.StringIO()
    ProgressLine(stream, 1)(MemoryCapped(4, 2, 90, 10**9, unit))

    assert f"step 4: rank 2 fits at most {words}" in stream.getvalue()


def test_the_line_does_not_hide_a_loss():
    """If the balanced step is slower than the equal one would be, it says so."""
    stream = io.StringIO()
    line = ProgressLine(stream, 2)
    for step in range(2):
        line(measured(step, makespan_s=0.6, wall_s=0.6))

    assert "costs 20 %" in stream.getvalue()


def test_where_no_step_is_whole_the_line_claims_nothing():
    """The first step of a loop ends when the next one begins; a gap hides what a step took."""
    for steps in ([measured(0)], [measured(0), measured(5, wall_s=0.4)]):
        stream = io.StringIO()
        line = ProgressLine(stream, len(steps))
        for step in steps:
            line(step)

        assert stream.getvalue().endswith(": batch 40 24, computing 0.2 s (idle 5 %)\n")


FOUND = WaitingDiagnosed(
    step=150,
    num_steps=149,
    step_s=0.1,
    waiting_share=0.23,
    explained_share=0.97,
    causes=("input", "network"),
    ranks=(1, -1),
    lost_share=(0.184, 0.05),
    evidence=("waiting for input takes 31 ms more", "all wait"),
    remedy=("give its loader more workers", "check the links"),
)
NONE = replace(FOUND, causes=(), ranks=(), lost_share=(), evidence=(), remedy=(), no_verdict="no")


def lines(*events):
    stream = io.StringIO()
    line = ProgressLine(stream, 1)
    for event in events:
        line(event)
    return stream.getvalue().splitlines()


def test_a_diagnosis_is_news_with_evidence_and_what_to_do():
    """The rank with its host; the evidence of the costliest cause. The same again is no news."""
    began = RunStarted(2, 64, 10, "Auto()", ("node3", "node7"), ("cpu", "cpu"))

    assert lines(began, FOUND, replace(FOUND, step=190)) == [
        "evenstep step 150: ranks wait for others in 23 % of their time. Lost by: rank 1@node7: "
        "input 18 %, network 5.0 %. Waiting for input takes 31 ms more. What to do: give its "
        "loader more workers"
    ]


def test_a_diagnosis_of_few_steps_is_not_told_of():
    """It says little yet."""
    assert not lines(replace(FOUND, num_steps=49))


@pytest.mark.parametrize(
    ("more", "sizes", "policy"),
    [
        ({}, "batch 40 24 at the end", "Auto()"),
        ({"cost_split_s": 0.3}, "samples by cost", "Auto()"),
        ({}, "batch 40 24 at the end", "Equal()"),
    ],
)
def test_the_last_line_is_on_the_whole_run(more, sizes, policy):
    """Three whole steps of 0.8 s, which would have taken 0.3 s more: a part of 1.1 s is saved."""
    began = RunStarted(2, 64, 10, policy, ("node3", "node7"), ("cpu", "cpu"))
    steps = [
        replace(
            measured(step, makespan_s=0.2, equal_split_s=0.5, wall_s=0.8 if step else None), **more
        )
        for step in range(4)
    ]
    end = (
        "; predicted to save 27 % of the time with equal batches. To check, run it with "
        "`EVENSTEP=off`"
    )

    *_, last = lines(began, *steps, RunEnded(4))
    assert last == f"evenstep ended after 4 steps: {sizes}" + (end if policy == "Auto()" else "")
    assert lines(began, RunEnded(0)) == []


def test_progress_lines_say_who_is_waited_for_until_none_is():
    """In every line; without hosts the rank alone."""
    _, after, last = lines(FOUND, measured(151), NONE, measured(152))

    assert after.endswith("; lost by rank 1: input 18 %, network 5.0 %")
    assert "lost by" not in last


def test_slow_input_is_a_warning_once(caplog):
    """Not where it is another cause that costs most, nor a second time."""
    log = FaultLog()
    with caplog.at_level(logging.WARNING, "evenstep"):
        log(NONE)
        log(replace(FOUND, causes=("network", "input"), ranks=(-1, 1)))
        assert caplog.records == []
        log(FOUND)
        log(replace(FOUND, ranks=(-1, 0)))
    (record,) = caplog.records

    assert record.getMessage() == (
        "Step 150: input is the limit, on rank 1 alone: waiting for input takes 31 ms more. What "
        "to do: give its loader more workers. Training continues; this warning is given once."
    )
