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
from ._recording import RECENT, Recording

_BAR = 32  # columns at most
_LEAST_BAR = 10  # columns without which it says nothing
_BARS = "one step: computing, then waiting"


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
        return Group(self._table(run), _progress(run, self._console.width))

    def _table(self, run: Recording) -> RenderableType:
        if len(run.batch_size[-1]) == 1:  # no other worker to compare with
            return Group(_shared_line(run, self._console.width), "")
        width = self._console.width
        return run_table(run, speeds=self._speeds, scale_s=self._scale_s, width=width)


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
            f"   {_step_text(run)}   idle {run.idle_share(last=RECENT):.0%}"
            + (f"   {clock_text(left_s)} left" if left_s else ""),
            highlight=False,
        )


def screen_for(console: Console, speeds: Sequence[float] | None) -> AbstractScreen:
    """Return the screen that suits where ``console`` prints."""
    return LiveScreen(console, speeds) if console.is_terminal else PlainScreen(console)


def run_table(
    run: Recording,
    *,
    speeds: Sequence[float] | None = None,
    scale_s: float | None = None,
    width: int = 100,
) -> RenderableType:
    """Return the table of a run's latest steps: one line per worker, and what they share.

    Args:
        run: with at least one step.
        speeds: emulated speeds, or None.
        scale_s: the time a full bar stands for; None takes the slowest worker's.
        width: columns of the terminal. Where they are few the bars give way to the figures.
    """
    columns = _columns(run, speeds)
    figures = sum(2 + max(len(name), *map(len, cells)) for name, cells in columns.items() if cells)
    bar = min(_BAR, width - figures - 2)
    if bar >= _LEAST_BAR:
        columns[_BARS] = _bars(run, scale_s or max(run.makespan_s[-RECENT:]), bar)
    table = Table(box=None, padding=(0, 1), pad_edge=True, header_style="dim")
    for name, cells in columns.items():
        if cells and name == _BARS:
            table.add_column(name, min_width=bar)
        elif cells:
            table.add_column(name, justify="right", no_wrap=True)
    for row in zip(*filter(None, columns.values()), strict=True):
        table.add_row(*row)
    return Group(table, _shared_line(run, width), "")


def _columns(run: Recording, speeds: Sequence[float] | None) -> dict[str, list[Text]]:
    """Return the cells of every column, in order; those of the bars are still to be drawn."""
    sizes, compute_s = run.batch_size[-1], run.recent(run.compute_s)
    workers = list(zip(sizes, compute_s, run.recent(run.idle_s), strict=True))
    return {
        "worker": [Text(str(rank), color_of(rank)) for rank in range(len(sizes))],
        "speed": [Text(speed_text(speed)) for speed in speeds or ()],
        "batch": [Text(str(size), "bold") for size in sizes],
        _BARS: [],
        "compute": [Text(seconds_text(compute)) for compute in compute_s],
        "waiting": [
            Text(f"{1e3 * idle:.0f} ms", "dim" if idle < 0.05 * compute else "red")
            for _, compute, idle in workers
        ],
        "samples/s": [
            Text(f"{size / compute:.0f}" if compute > 0 else "-") for size, compute, _ in workers
        ],
    }


def _shared_line(run: Recording, width: int) -> Text:
    line = Text("  ")
    line.append(_step_text(run), "bold")
    if len(run.batch_size[-1]) > 1:
        line.append(f"   idle {run.idle_share(last=RECENT):.0%}")
    if run.loss:
        line.append(f"   loss {run.loss[-1]:.3f}")
    if run.reason:
        line.append(f"   {run.reason}", "dim italic")
    line.truncate(min(width, 100), overflow="ellipsis")
    return line


def _step_text(run: Recording) -> str:
    walls = run.known_wall_s(last=RECENT)
    shown_s = sorted(walls)[len(walls) // 2] if walls else run.makespan_s[-1]
    return f"{seconds_text(shown_s)} a step"


def _bars(run: Recording, full_s: float, width: int) -> list[Text]:
    """Return a bar for each worker; a full one stands for ``full_s``."""
    bars = []
    times = zip(run.recent(run.compute_s), run.recent(run.idle_s), strict=True)
    for rank, (compute, idle) in enumerate(times):
        busy = min(width, round(width * compute / full_s))
        end = min(width, round(width * (compute + idle) / full_s))
        bars.append(Text("█" * busy, color_of(rank)))
        bars[-1].append("░" * (end - busy), "red dim")
        bars[-1].append(" " * (width - max(busy, end)))
    return bars


def _progress(run: Recording, width: int) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    left_s = run.left_s()
    row.add_row(
        Text(f"  step {run.num_done}/{run.num_steps}"),
        ProgressBar(total=run.num_steps, completed=run.num_done, width=min(50, width - 30)),
        Text("" if left_s is None else f"{clock_text(left_s)} left", "cyan"),
    )
    return row


def _announce(console: Console, title: str, explanation: str) -> None:
    console.print(Text.assemble((title, "bold"), "\n   ", (explanation, "dim")))
