"""The screen says what is going on, with and without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from evenstep.demo._print_report import print_report
from evenstep.demo._recording import Recording
from evenstep.demo._screen import Screen, run_table
from evenstep.demo._summary import summarise

from .recordings import recording

SPEEDS = (1.0, 0.5, 1 / 3, 1 / 6)
EQUAL, BEST = (24, 24, 24, 24), (48, 24, 16, 8)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def written(console):
    return console.file.getvalue()


def test_each_worker_has_a_line_with_its_batch_and_its_times(console):
    """Batch, computing, waiting and samples per second, beside the speed it was given."""
    console.print(run_table(recording([EQUAL], SPEEDS), speeds=SPEEDS))
    line = next(line for line in written(console).splitlines() if line.strip().startswith("2 "))

    assert [word for word in line.split() if "█" not in word] == [
        "2", "1/3", "24", "288", "ms", "288", "ms", "83",
    ]  # fmt: skip


def test_bars_are_as_long_as_the_times_they_stand_for(console):
    """At the equal split a worker of half the speed computes twice as long."""
    console.print(run_table(recording([EQUAL], SPEEDS), speeds=SPEEDS))
    busy = [line.count("█") for line in written(console).splitlines() if "█" in line]

    assert busy == [5, 11, 16, 32]


def test_a_balanced_run_is_drawn_to_the_scale_of_the_equal_one(console):
    """The bars are seen to shrink."""
    equal = recording([EQUAL], SPEEDS)
    console.print(run_table(recording([BEST], SPEEDS), scale_s=equal.makespan_s[-1]))
    busy = [line.count("█") for line in written(console).splitlines() if "█" in line]

    assert busy == [11, 11, 11, 11]


@pytest.mark.parametrize("width", [100, 80, 60, 52])
def test_a_narrow_terminal_has_all_figures_whole(console, width):
    """No line is too wide, and the bars give way; "250 ms" is never "25"."""
    run = recording([EQUAL], SPEEDS)
    run.reason = "a very long reason " * 20
    console.width = width
    console.print(run_table(run, speeds=SPEEDS, width=width))
    lines = written(console).splitlines()
    line = next(line for line in lines if line.strip().startswith("2 "))

    assert max(map(len, lines)) <= width
    assert [word for word in line.split() if "█" not in word] == [
        "2", "1/3", "24", "288", "ms", "288", "ms", "83",
    ]  # fmt: skip


def test_what_has_no_room_at_all_is_seen_to_be_cut(console):
    """By an ellipsis."""
    console.width = 30
    console.print(run_table(recording([EQUAL], SPEEDS), speeds=SPEEDS, width=30))

    assert "28…" in written(console)
    assert " 28 " not in written(console)


def test_without_a_terminal_there_are_plain_lines(console):
    """Logs get the phase, then a line now and then, then the last step."""
    screen = Screen(console, SPEEDS)
    run = Recording()
    screen.begin("Equal split", "all wait for the last")
    screen.show(run)
    screen.show(run)
    screen.end(recording([EQUAL], SPEEDS))
    lines = written(console).splitlines()

    assert lines[2] == "  starting the workers ..."
    assert lines[3].startswith("  step 20/20   batch 24 + 24 + 24 + 24   586 ms a step   idle 50%")


def test_a_terminal_gets_a_live_table():
    """It ends with the table of the last steps, also after being cut short."""
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    screen = Screen(console, SPEEDS)
    for result in (recording([EQUAL], SPEEDS), None):
        screen.begin("Equal split", "all wait for the last")
        screen.show(Recording())
        screen.show(recording([EQUAL], SPEEDS))
        screen.end(result)

    assert "samples/s" in written(console)


def test_a_terminal_that_cannot_redraw_has_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    screen = Screen(console, SPEEDS)
    screen.begin("Equal split", "all wait for the last")
    screen.show(recording([EQUAL], SPEEDS))

    assert "step 20/20" in written(console)


def test_the_report_gives_figures_limit_and_losses(console):
    """What a person came for stands in the first line."""
    equal, balanced = recording([EQUAL], SPEEDS), recording([EQUAL, BEST], SPEEDS)
    summary = summarise(equal, balanced, recording([(96,)], (1.0,)), speeds=SPEEDS)
    print_report(console, summary)
    text = written(console)

    assert text.startswith("Result  2.9 times as fast, at 98% of what is physically possible")
    assert "48 + 24 + 16 + 8" in text
    assert "Physical limit 198 ms" in text
    assert "too busy" not in text


def test_the_report_warns_when_the_machine_was_too_busy(console):
    """Figures that mean little are not left to look like others."""
    equal, balanced = recording([EQUAL], SPEEDS), recording([EQUAL, BEST], SPEEDS)
    equal.late_steps = 4
    summary = summarise(equal, balanced, speeds=SPEEDS)
    print_report(console, summary)

    assert "In 20% of the steps this machine was too busy" in written(console)
