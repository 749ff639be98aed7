"""What the demo shows while it runs: a live table, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ._look import clock_text, color_of, seconds_text, sizes_text, speed_text
from ._recording import Recording

_BAR = 32


class AbstractScreen(ABC):
    """Shows one run after the other: ``begin``, ``show`` again and again, ``end``."""

    @abstractmethod
    def begin(self, title: str, explanation: str, *, scale_s: float | None = None) -> None:
        """Announce a run. ``scale_s`` is the time a full bar stands for; None adapts."""

    @abstractmethod
    def show(self, run: Recording) -> None:
        """Show how it stands."""

    @abstractmethod
    def end(self, run: Recording | None) -> None:
        """Show how it ended; None if it was cut short."""


@final
class LiveScreen(AbstractScreen):
    """A table that is redrawn in place.

    Args:
        console: a terminal.
        speeds: emulated speeds, to stand beside the workers; None leaves them out.
    """

    def __init__(self, console: Console, speeds: Sequence[float] | None) -> None:
        self._console = console
        self._speeds = speeds
        self._live: Live | None = None

    def begin(self, title: str, explanation: str, *, scale_s: float | None = None) -> None:
        self._scale_s = scale_s
        self._spinner = Spinner("dots", style="cyan")
        _announce(self._console, title, explanation)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._live.start()

    def show(self, run: Recording) -> None:
        assert self._live is not None
        self._live.update(self._picture(run))

    def end(self, run: Recording | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if run is not None and run.num_done:
            self._console.print(self._table(run))

    def _picture(self, run: Recording) -> RenderableType:
        if not run.num_done:
            self._spinner.update(text=Text(f" {run.phase} ...", style="cyan"))
            return Padding(self._spinner, (0, 2))
        return Group(self._table(run), _progress(run))

    def _table(self, run: Recording) -> RenderableType:
        if len(run.batch_size[-1]) == 1:  # nobody to compare with
            return Group(_shared_line(run), "")
        return run_table(run, speeds=self._speeds, scale_s=self._scale_s)


@final
class PlainScreen(AbstractScreen):
    """A line now and then, for logs and pipes.

    Args:
        console: where to print.
        every_s: seconds between two lines.
    """

    def __init__(self, console: Console, *, every_s: float = 5.0) -> None:
        self._console = console
        self._every_s = every_s

    def begin(self, title: str, explanation: str, *, scale_s: float | None = None) -> None:
        self._next_s = 0.0
        self._phase = ""
        _announce(self._console, title, explanation)

    def show(self, run: Recording) -> None:
        if not run.num_done:
            if run.phase != self._phase:
                self._phase = run.phase
                self._console.print(f"  {run.phase} ...", highlight=False)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            self._line(run)

    def end(self, run: Recording | None) -> None:
        if run is not None and run.num_done:
            self._line(run)
        self._console.print()

    def _line(self, run: Recording) -> None:
        left_s = run.left_s()
        self._console.print(
            f"  step {run.num_done}/{run.num_steps}   batch {sizes_text(run.batch_size[-1])}"
            f"   {_step_text(run)}   idle {_idle_share(run):.0%}"
            + (f"   {clock_text(left_s)} left" if left_s else ""),
            highlight=False,
        )


def screen_for(console: Console, speeds: Sequence[float] | None) -> AbstractScreen:
    """Return the screen that suits where ``console`` prints."""
    return LiveScreen(console, speeds) if console.is_terminal else PlainScreen(console)


def run_table(
    run: Recording, *, speeds: Sequence[float] | None = None, scale_s: float | None = None
) -> RenderableType:
    """Return the table of a run's latest steps: one line per worker, and what they share.

    Args:
        run: with at least one step.
        speeds: emulated speeds, or None.
        scale_s: the time a full bar stands for; None takes the slowest worker's.
    """
    compute_s, idle_s = run.recent(run.compute_s), run.recent(run.idle_s)
    full_s = scale_s or max(run.makespan_s[-5:])
    table = Table(box=None, padding=(0, 1), pad_edge=True, header_style="dim")
    table.add_column("worker", justify="right")
    if speeds is not None:
        table.add_column("speed", justify="right")
    table.add_column("batch", justify="right")
    table.add_column("one step: computing, then waiting", min_width=_BAR)
    table.add_column("compute", justify="right")
    table.add_column("waiting", justify="right")
    table.add_column("samples/s", justify="right")
    rows = zip(run.batch_size[-1], compute_s, idle_s, strict=True)
    for rank, (size, compute, idle) in enumerate(rows):
        speed = [] if speeds is None else [speed_text(speeds[rank])]
        table.add_row(
            Text(str(rank), color_of(rank)),
            *speed,
            Text(str(size), "bold"),
            _bar(compute, idle, full_s, color_of(rank)),
            seconds_text(compute),
            Text(f"{1e3 * idle:.0f} ms", "dim" if idle < 0.05 * compute else "red"),
            f"{size / compute:.0f}" if compute > 0 else "-",
        )
    return Group(table, _shared_line(run), "")


def _shared_line(run: Recording) -> Text:
    line = Text("  ")
    line.append(_step_text(run), "bold")
    if len(run.batch_size[-1]) > 1:
        line.append(f"   idle {_idle_share(run):.0%}")
    if run.loss:
        line.append(f"   loss {run.loss[-1]:.3f}")
    if run.reason:
        line.append(f"   {run.reason}", "dim italic")
    line.truncate(100, overflow="ellipsis")
    return line


def _step_text(run: Recording) -> str:
    walls = run.known_wall_s(last=5)
    shown_s = sorted(walls)[len(walls) // 2] if walls else run.makespan_s[-1]
    return f"{seconds_text(shown_s)} a step"


def _idle_share(run: Recording) -> float:
    idle_s, makespan_s = run.idle_s[-5:], run.makespan_s[-5:]
    return sum(map(sum, idle_s)) / (len(idle_s[0]) * sum(makespan_s))


def _bar(compute_s: float, idle_s: float, full_s: float, color: str) -> Text:
    busy = min(_BAR, round(_BAR * compute_s / full_s))
    end = min(_BAR, round(_BAR * (compute_s + idle_s) / full_s))
    bar = Text("█" * busy, color)
    bar.append("░" * (end - busy), "red dim")
    bar.append(" " * (_BAR - max(busy, end)))
    return bar


def _progress(run: Recording) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    left_s = run.left_s()
    row.add_row(
        Text(f"  step {run.num_done}/{run.num_steps}"),
        ProgressBar(total=run.num_steps, completed=run.num_done, width=50),
        Text("" if left_s is None else f"{clock_text(left_s)} left", "cyan"),
    )
    return row


def _announce(console: Console, title: str, explanation: str) -> None:
    console.print(Text.assemble((title, "bold"), "\n   ", (explanation, "dim")))
