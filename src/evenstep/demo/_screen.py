"""What the demo shows while it runs: a live table, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .._render._words import clock, ratio, seconds, sizes
from ._recording import RECENT, Recording

_LINE_EVERY_S = 5.0
_WORKER_COLORS = (
    "#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#aaaaaa",
)  # fmt: skip
_BAR = 32  # columns at most
_LEAST_BAR = 10  # columns without which it says nothing
_BARS = "one step: computing, then waiting"


def color_of(rank: int) -> str:
    """Return the colour of a worker; told apart by most colour-blind people (Tol 2021)."""
    return _WORKER_COLORS[rank % len(_WORKER_COLORS)]


@final
class Screen:
    """Shows one run after the other: ``begin``, ``show`` again and again, ``end``.

    A terminal has a table that is redrawn in place; a log or a pipe has a line now and then.

    Args:
        console: where to.
        speeds: emulated speeds, to stand beside the workers; None leaves them out.
    """

    def __init__(self, console: Console, speeds: Sequence[float] | None) -> None:
        self._console, self._speeds = console, speeds
        self._live: Live | None = None

    def begin(self, title: str, explanation: str, *, scale_s: float | None = None) -> None:
        """Announce a run. ``scale_s`` is the time a full bar stands for; None adapts."""
        self._scale_s, self._phase, self._next_s = scale_s, "", 0.0
        self._console.print(Text.assemble((title, "bold"), "\n   ", (explanation, "dim")))
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def show(self, run: Recording) -> None:
        """Show how it stands."""
        if self._live is not None:
            phase = Text(f"  {run.phase} ...", style="cyan")
            self._live.update(
                Group(self._table(run), _progress(run, self._console.width))
                if run.num_done
                else phase
            )
        elif not run.num_done:
            if run.phase != self._phase:
                self._phase = run.phase
                self._console.print(f"  {run.phase} ...", highlight=False)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            self._console.print(_line(run), highlight=False)

    def end(self, run: Recording | None) -> None:
        """Show how it ended; None if it was cut short."""
        ended = run if run is not None and run.num_done else None
        if self._live is not None:
            self._live.stop()
            self._live = None
            if ended is not None:
                self._console.print(self._table(ended))
            return
        if ended is not None:
            self._console.print(_line(ended), highlight=False)
        self._console.print()

    def _table(self, run: Recording) -> RenderableType:
        width = self._console.width
        if len(run.batch_size[-1]) == 1:  # no other worker to compare with
            return Group(_shared_line(run, width), "")
        return run_table(run, speeds=self._speeds, scale_s=self._scale_s, width=width)


def _line(run: Recording) -> str:
    left_s = run.left_s()
    return (
        f"  step {run.num_done}/{run.num_steps}   batch {sizes(run.batch_size[-1])}"
        f"   {_step_text(run)}   idle {run.idle_share(last=RECENT):.0%}"
        + (f"   {clock(left_s)} left" if left_s else "")
    )


def run_table(
    run: Recording,
    *,
    speeds: Sequence[float] | None = None,
    scale_s: float | None = None,
    width: int = 100,
) -> RenderableType:
    """Return the table of a run's latest steps: one line per worker, and what they share."""
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
    batch_size, compute_s = run.batch_size[-1], run.recent(run.compute_s)
    workers = list(zip(batch_size, compute_s, run.recent(run.idle_s), strict=True))
    return {
        "worker": [Text(str(rank), color_of(rank)) for rank in range(len(batch_size))],
        "speed": [Text(ratio(speed)) for speed in speeds or ()],
        "batch": [Text(str(size), "bold") for size in batch_size],
        _BARS: [],
        "compute": [Text(seconds(compute)) for compute in compute_s],
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
    return f"{seconds(shown_s)} a step"


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
        Text("" if left_s is None else f"{clock(left_s)} left", "cyan"),
    )
    return row
