"""How a run looks in the terminal: its state, its ranks, where the time goes, what happened."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import final

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from .._render import clock, counted, number, percent, printable, seconds
from .._telemetry._line import shortened, spent
from ..events import Rebalanced, WaitingDiagnosed
from ._live_run import LiveRun, RankFigures

_LEAST_ROWS = 3  # of ranks, however low the terminal is
_BAR, _LEAST_TREND, _MOST_TREND = 10, 6, 24  # columns
_WHERE, _SHORT_WHERE = 40, 20  # columns of host and device, at most
_BARS = "own, waits"
_WORDS = ("where", "cause", _BARS, "trend")
_BLOCKS = "▁▂▃▄▅▆▇█"


@final
@dataclass(frozen=True, slots=True)
class TopView:
    """A run as it stands, drawn to the width and height of the console.

    Args:
        run: what is known of it.
        title: where it is read from.
        remark: what of it was not read; may be empty.
        silent_s: seconds since the newest event, as far as is known.
        fits: whether to leave out ranks that the height has no room for.
    """

    run: LiveRun
    title: str
    remark: str = ""
    silent_s: float = 0.0
    fits: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
        width = options.max_width
        above = [*self._header(width), *self._state(width)]
        news = [Text(_printable(text), "yellow") for text in self.run.news]
        below: list[Text] = []
        for part in (_causes(self.run), [*map(_change, self.run.plans)], news):
            below += [Text(), *part] if part else []
        if self.remark:
            below.append(Text(_printable(self.remark), "dim"))
        heights = [max(1, ceil(text.cell_len / max(width, 1))) for text in (*above, *below)]
        used = sum(heights) + 3  # heads, blank, more
        ranks = self.run.ranks()
        shown = ranks
        if self.fits:
            shown = ranks[: max(_LEAST_ROWS, (options.height or console.height) - used - 1)]
        table = [Text(), *_table(self.run, shown, width)] if ranks else []
        if num_more := len(ranks) - len(shown):
            table.append(Text(f"and {num_more} more ranks, for which less is lost", "dim"))
        yield Group(*above, *table, *below)

    def _header(self, width: int) -> list[Text]:
        parts = [Text.assemble(("evenstep top ", "bold"), _printable(self.title))]
        if (start := self.run.start) is not None:
            count = counted(start.world_size, "worker")
            workers = f"{count}, {start.global_batch_size} samples a step"
            parts += [Text(_printable(start.policy.partition("(")[0]), "dim"), Text(workers, "dim")]
        return _flow(parts, width)

    def _state(self, width: int) -> list[Text]:
        run = self.run
        if run.last is None:
            return [Text("no step was measured yet", "cyan")]
        step_s = "-" if run.step_s is None else seconds(run.step_s)
        pace = Text(f"{step_s} a step   idle {percent(run.idle_share or 0)} %")
        lines = _flow([_progress(run), pace, _saved(run)], width)
        if run.ended is not None:
            count = counted(run.ended.num_steps, "step")
            lines.append(Text(f"the run ended after {count}", "cyan"))
        elif self.silent_s > max(10.0, 10 * (run.step_s or 0)):
            lines.append(Text(f"no new event for {clock(self.silent_s)}", "yellow"))
        time = [Text(part) for part in spent(run.accounts)]
        if time:
            time[0] = Text.assemble("time: ", time[0])
            lines += _flow(time, width, between=", ")
        return lines


def _flow(parts: list[Text], width: int, between: str = "   ") -> list[Text]:
    """Return ``parts`` in as few lines as have room for them, none broken before it is too long."""
    lines = [Text()]
    for part in filter(None, parts):
        if lines[-1] and lines[-1].cell_len + len(between) + part.cell_len > width:
            lines.append(Text())
        lines[-1] = Text.assemble(lines[-1], between if lines[-1] else "", part)
    return lines


def _progress(run: LiveRun) -> Text:
    assert run.last is not None
    text = Text.assemble((f"step {run.last.step}", "bold"))
    if run.start is not None and run.start.num_steps:
        done = run.last.step % run.start.num_steps + 1
        left = "" if run.left_s is None else f", {clock(run.left_s)} left"
        text.append(f" ({done} of {run.start.num_steps} of its epoch{left})")
    return text


def _saved(run: LiveRun) -> Text:
    wall_s, equal_s = run.whole.wall_s, run.whole.equal_s
    if not wall_s or equal_s <= 0 or (run.start is not None and run.start.keeps_equal):
        return Text()
    saved_s = equal_s - wall_s
    verb = "saved" if saved_s >= 0 else "lost"
    share = percent(abs(saved_s) / equal_s)
    return Text(f"{verb} {_long(abs(saved_s))} ({share} %) since step {run.first_step}")


def _table(run: LiveRun, ranks: list[RankFigures], width: int) -> list[Text]:
    """Return the figures of ``ranks``, as many columns as there is room for."""
    columns = _columns(run, ranks)
    columns["where"] = [Text(_where(run, one.rank)) for one in ranks]
    if width - _wide(columns) - 1 < _BAR + _LEAST_TREND + 1:
        columns["where"] = [Text(_where(run, one.rank, in_full=False)) for one in ranks]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    while len(columns) > 1 and _wide(columns) > width:
        columns.popitem()
    if (room := width - _wide(columns) - 1) >= _BAR:
        columns[_BARS] = [_bar(one, ranks) for one in ranks]
        room -= max(_BAR, len(_BARS)) + 1
    if room >= _LEAST_TREND:
        most_s = max(max(one.own_s) for one in ranks)
        newest = min(room, _MOST_TREND)
        columns["trend"] = [Text(_sparkline(one.own_s[-newest:], most_s)) for one in ranks]
    return _aligned(columns)


def _aligned(columns: dict[str, list[Text]]) -> list[Text]:
    """Return a line for the names and one for each row: a table of rich's takes ten times as long.

    Args:
        columns: cells by name, at least one column, as many cells in each.
    """
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    heads = [Text(name, "dim") for name in columns]
    lines = []
    for row in (heads, *zip(*columns.values(), strict=True)):
        line = Text(no_wrap=True, overflow="crop")
        for name, cell in zip(columns, row, strict=True):
            gap = " " * (widths[name] - len(cell))
            line.append_text(cell) if name in _WORDS else line.append(gap).append_text(cell)
            line.append(gap + " " if name in _WORDS else " ")
        line.rstrip()
        lines.append(line)
    return lines


def _columns(run: LiveRun, ranks: list[RankFigures]) -> dict[str, list[Text]]:
    """Return the cells of every column, what can be left out last at the end."""
    read_s = 0.01 * (run.step_s or 0)
    reads = any(one.input_s > read_s for one in ranks)
    return {
        "rank": [Text(str(one.rank)) for one in ranks],
        "where": [],
        "batch": [Text(str(one.batch_size), "bold") for one in ranks],
        "samples/s": [Text("-" if one.speed is None else number(one.speed)) for one in ranks],
        "computing": [Text(seconds(one.compute_s)) for one in ranks],
        "input": [Text(seconds(one.input_s)) for one in ranks if reads],
        "waiting": [Text(seconds(one.waiting_s)) for one in ranks],
        "lost": [Text(seconds(one.lost_s), "red" if one.lost_s else "dim") for one in ranks],
        "cause": [Text(_printable(one.cause), "red") for one in ranks],
    }


def _wide(columns: dict[str, list[Text]]) -> int:
    widths = [max(len(name), *map(len, cells)) for name, cells in columns.items() if any(cells)]
    return sum(widths) + len(widths) - 1


def _where(run: LiveRun, rank: int, *, in_full: bool = True) -> str:
    """Return host and device; not in full, without what kind of device it is."""
    if run.start is None or len(run.start.hosts) <= rank:
        return ""
    device = run.start.devices[rank]
    text = _printable(f"{run.start.hosts[rank]} {device if in_full else device.partition(' ')[0]}")
    most = _WHERE if in_full else _SHORT_WHERE
    return text if len(text) <= most else text[: most - 3] + "..."


def _bar(one: RankFigures, ranks: list[RankFigures]) -> Text:
    """Return a bar of own time and waiting; a full one is the longest of all ranks."""
    full_s = max(each.compute_s + each.input_s + each.waiting_s for each in ranks) or 1.0
    busy = min(_BAR, round(_BAR * (one.compute_s + one.input_s) / full_s))
    waits = min(_BAR - busy, round(_BAR * one.waiting_s / full_s))
    return Text.assemble(("█" * busy, "green"), ("░" * waits, "red"))


def _sparkline(values: tuple[float, ...], most: float) -> str:
    """Return blocks, the lowest for 0 and the highest for ``most``: the same in all rows."""
    return "".join(_BLOCKS[min(7, int(8 * value / (most or 1.0)))] for value in values)


def _causes(run: LiveRun) -> list[Text]:
    found = run.diagnosis
    if found is None:
        return []
    title = f"waiting is {percent(found.waiting_share)} % of the time, at step {found.step}"
    if not found.causes:
        return [Text(f"{title}: no verdict. {_printable(found.no_verdict)}")]
    return [Text(title), *(_cause(run, found, at) for at in range(len(found.causes)))]


def _cause(run: LiveRun, found: WaitingDiagnosed, at: int) -> Text:
    rank = found.ranks[at]
    whose = f"rank {rank}" if rank >= 0 else "all ranks"
    if run.start is not None and 0 <= rank < len(run.start.hosts):
        whose += f"@{run.start.hosts[rank]}"
    line = Text.assemble(
        f"  {percent(found.lost_share[at])} %  ",
        (_printable(f"{whose}: {found.causes[at]}"), "bold red"),
    )
    more = [text for text in (found.evidence[at], found.remedy[at]) if text]
    return line.append(
        _printable("".join(f". {text[:1].upper()}{text[1:].rstrip('.')}" for text in more))
    )


def _change(plan: Rebalanced) -> Text:
    sizes = shortened(plan.batch_size)
    return Text(f"from step {plan.step}: batch {sizes}: {_printable(plan.reason)}")


def _printable(text: str, most: int = 300) -> str:
    """Return what is shown of ``text``, which may be another's and long."""
    return printable(text if len(text) <= most else text[: most - 3] + "...")


def _long(value: float) -> str:
    return f"{number(value / 3600)} h" if value >= 3600 else clock(value)
