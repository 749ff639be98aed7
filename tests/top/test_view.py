"""What a reader sees of a run: in colour or plain, at any width and height."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from evenstep._top import LiveRun, TopView
from evenstep.events import PolicyFailed, Rebalanced, RunEnded

from .runs import DIAGNOSED, events, measured, started


def told(*parts):
    run = LiveRun()
    for event in parts:
        run.add(event)
    return run


def text(run, *, width=120, height=50, terminal=False, **options):
    """The view as a terminal of that size gets it, or a pipe."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=height, force_terminal=terminal)
    console.print(TopView(run, "runs/mine", **options))
    return stream.getvalue()


RUN = [
    *events(),
    DIAGNOSED,
    Rebalanced(5, 1, (40, 20, 34, 34), "rank 1 is slower"),
    PolicyFailed(7, "KeyError: 'x'", "Mine"),
]


def test_everything_is_on_one_page():
    """Where the run stands, its ranks, causes with remedies, plans with reasons, faults."""
    page = text(told(*RUN), remark="2 damaged lines are left out")

    for words in (
        "evenstep top runs/mine   Auto   4 workers, 128 samples a step",
        "step 9 (10 of 100 of its epoch, 0:29 left)   320 ms a step   idle 33 %",
        "saved 0:01 (24 %) since step 0",
        "forward 33 %, backward 33 %, waiting 33 %",
        "23 %  rank 1@node0: slow worker. Computes 300 ms, the median is 200 ms. Balance by speed",
        "from step 5: batch 40 20 34 34: rank 1 is slower",
        "the policy Mine failed",
        "2 damaged lines are left out",
    ):
        assert words in page
    first = next(line for line in page.splitlines() if "node0 cuda:1" in line)
    assert first.split()[:2] == ["1", "node0"]
    for cell in ("32", "107", "300 ms", "50 ms", "100 ms", "slow worker", "██████"):
        assert cell in first


def test_no_verdict_is_said_with_its_reason():
    """Rather than nothing, or a guess."""
    unknown = type(DIAGNOSED)(9, 9, 0.3, 0.25, 0.5, (), (), (), (), (), "half is unexplained")

    assert "no verdict. half is unexplained" in text(told(*events(), unknown))


@pytest.mark.parametrize("height", [12, 24, 40])
def test_a_low_terminal_shows_the_worst_ranks_and_counts_the_others(height):
    """The view is never higher than the terminal."""
    lines = text(told(*events(10, 64)), width=80, height=height).splitlines()
    shown = [line for line in lines if " node" in line]
    (more,) = [line for line in lines if "more ranks" in line]

    assert len(lines) <= height
    assert shown[0].split()[0] == "1"
    assert more == f"and {64 - len(shown)} more ranks, for which less is lost"
    assert len(shown) >= 3


def test_one_view_of_all_ranks_has_them_all():
    """Whatever the height."""
    page = text(told(*events(10, 64)), width=80, height=10, fits=False)

    assert sum(" node" in line for line in page.splitlines()) == 64


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    """Columns are left out before the figures that matter are."""
    lines = text(told(*RUN), width=width).splitlines()

    assert max(map(len, lines)) <= width
    assert any("rank" in line and "batch" in line for line in lines)


def test_a_pipe_gets_plain_text_and_a_terminal_colours(monkeypatch):
    """And a terminal whose user wants none, none (https://no-color.org)."""
    assert "\x1b[" not in text(told(*RUN))
    assert "\x1b[31m" in text(told(*RUN), terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in text(told(*RUN), terminal=True)


def test_a_terminal_obeys_nothing_that_a_file_says():
    """Names and reasons may be another's, with commands for the terminal in them."""
    start = started(1)
    evil = type(start)(1, 32, 0, "\x1b]0;title\x07", ("\x1b[2Jhost",), ("[red]cpu[/red]\n",))
    page = text(told(evil, measured(0, 1, slow=0), Rebalanced(1, 1, (32,), "\r\x1b[2J")))

    assert "\x1b" not in page
    assert "\r" not in page
    assert "[red]cpu[/red]" in page


def test_how_a_run_stands_is_said():
    """Not begun, silent for long, or ended."""
    assert "no step was measured yet" in text(told())
    assert "no new event for 1:05" in text(told(*RUN), silent_s=65)
    assert "no new event" not in text(told(*RUN), silent_s=2)
    ended = text(told(*RUN, RunEnded(10)), silent_s=65)
    assert "the run ended after 10 steps" in ended
    assert "no new event" not in ended


@given(
    seconds=st.lists(st.floats(0, 1e12), min_size=3, max_size=3),
    sizes=st.lists(st.integers(0, 2**50), min_size=3, max_size=3),
    width=st.integers(20, 200),
)
def test_any_figures_can_be_shown(seconds, sizes, width):
    """Steps of no time, of ages, and of no samples."""
    step = measured(0, 3)
    odd = type(step)(0, 0, tuple(sizes), tuple(seconds), tuple(seconds), (0.0,) * 3, max(seconds),
                     0.0, None, None, None)  # fmt: skip

    assert max(map(len, text(told(started(3), odd, odd), width=width).splitlines())) <= width


def test_equal_sizes_that_are_kept_save_and_lose_nothing():
    """Whatever the fits say of the equal split."""
    start, *rest = events()
    assert "saved" in text(told(start, *rest))
    kept = text(told(replace(start, policy="Equal()"), *rest))
    assert "saved" not in kept
    assert "lost 0:" not in kept
