"""What a person reads of waiting: in the progress line, as news, and as a warning."""

import io
import logging
from dataclasses import replace

from evenstep._telemetry import FaultLog, ProgressLine
from evenstep.events import RunStarted, WaitingDiagnosed

from .steps import measured

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
