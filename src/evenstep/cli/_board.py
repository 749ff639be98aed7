"""The leaderboard of ``evenstep simulate``: in a terminal, as a page, as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import __version__
from .._render._words import Row, markdown_table, number, paragraph, percent, text_table
from ._contest import Contest
from ._trials import Case, Played

_Table = Callable[..., str]


@dataclass(frozen=True, slots=True)
class BoardLine:
    """How a policy under a scheme did over all scenarios: means over the runs of each.

    Attributes:
        policy: its name.
        scheme: its name.
        regret: mean over the runs of each scenario.
        mean_regret: mean over the scenarios, however many runs each has.
        samples_per_s: likewise, as are the two below.
        idle_share: of the time of all.
        moves_per_step: claims and hand-overs.
        staleness: the most of all runs.
    """

    policy: str
    scheme: str
    regret: dict[str, float]
    mean_regret: float
    samples_per_s: float
    idle_share: float
    moves_per_step: float
    staleness: int


@dataclass(frozen=True, slots=True)
class Leaderboard:
    """What was compared, every run, and who stands where.

    Attributes:
        contest: what was asked for.
        runs: every run.
    """

    contest: Contest
    runs: tuple[Played, ...]

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Names of scenarios and traces, in the order in which they were asked for."""
        return tuple(dict.fromkeys(case.name for case in self.contest.cases))

    @property
    def lines(self) -> list[BoardLine]:
        """Policies under schemes, the lowest mean regret first; equals as they came."""
        found: dict[tuple[str, str], dict[str, list[Played]]] = {}
        for run in self.runs:
            rows = found.setdefault((run.policy, run.scheme), {})
            rows.setdefault(run.scenario, []).append(run)
        return sorted((_line(*who, rows) for who, rows in found.items()), key=_mean_regret)


def _line(policy: str, scheme: str, rows: dict[str, list[Played]]) -> BoardLine:
    def means(name: str) -> dict[str, float]:
        return {
            scenario: fmean(getattr(run, name) for run in runs) for scenario, runs in rows.items()
        }

    return BoardLine(
        policy=policy,
        scheme=scheme,
        regret=means("regret"),
        mean_regret=fmean(means("regret").values()),
        samples_per_s=fmean(means("samples_per_s").values()),
        idle_share=fmean(means("idle_share").values()),
        moves_per_step=fmean(means("moves_per_step").values()),
        staleness=max(run.staleness for runs in rows.values() for run in runs),
    )


def _mean_regret(line: BoardLine) -> float:
    return line.mean_regret


def as_text(board: Leaderboard, width: int | None = None) -> str:
    """Return the table for a terminal of ``width`` columns, or of any."""
    head, *notes = (paragraph(text, width) for text in (f"{headline(board)}.", *_notes(board)))
    return "\n\n".join([head, _table(board, partial(text_table, width=width)), *notes])


def as_json(board: Leaderboard) -> dict[str, Any]:
    """Return all of it as plain values; shares are fractions of 1."""
    return {
        "evenstep": __version__,
        "command": board.contest.command,
        "standings": [asdict(line) for line in board.lines],
        "runs": [asdict(run) for run in board.runs],
        "recorded_step_s": {
            case.name: case.recorded_s for case in board.contest.cases if case.trace is not None
        },
    }


def as_markdown(board: Leaderboard, *, png: Path | None, page: Path) -> str:
    """Return the page; ``png`` is the picture that it shows, if any."""
    parts = ["# Leaderboard", f"{headline(board)}."]
    if png is not None:
        link = Path(os.path.relpath(png, page.parent)).as_posix()
        parts.append(f"![{headline(board)}]({link})")
    command = f"{board.contest.command}{f' --png {png}' if png else ''} --markdown {page}"
    parts += [_table(board, markdown_table), *_notes(board), _LEGEND]
    parts += ["This page is written by", f"```console\n$ {command}\n```"]
    return "\n\n".join(parts) + "\n"


def headline(board: Leaderboard) -> str:
    """Return what the figures are."""
    settings = dict.fromkeys(_setting(case, board.contest.cases) for case in board.contest.cases)
    return f"Mean step time above the perfect-foresight oracle's, in %: {'; '.join(settings)}"


_LEGEND = """Lower is better. The oracle, at 0, knows the time of every step except for its jitter;
`equal` is plain DDP. A scenario's column is the mean over its seeds, `mean` that over the
scenarios. `idle` is the waiting of all workers as a share of their time, in %.

Every policy has its defaults and receives only the times of the steps. No policy receives
profiles, CPU or memory data, which some could use. The constants of `auto` were chosen on
other seeds of these generators, from 1000."""


def _setting(case: Case, cases: Sequence[Case]) -> str:
    if case.trace is not None:
        return f"{case.name} at {case.global_batch_size} samples a step"
    seeds = sorted({each.seed for each in cases if each.seed is not None})
    several = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return (
        f"{case.world_size} workers, {case.global_batch_size} samples a step, "
        f"{case.num_steps} steps, {several}"
    )


def _notes(board: Leaderboard) -> Iterator[str]:
    for case in board.contest.cases:
        if case.recorded_s is not None:
            best_s = next(run.best_step_s for run in board.runs if run.scenario == case.name)
            yield (
                f"As recorded, a step of {case.name} took {number(case.recorded_s)} s in the mean, "
                f"{percent(case.recorded_s / best_s - 1)} % above the oracle's."
            )
    if set(board.contest.schemes) != {"bsp"}:
        yield (
            "The oracle's plan is carried out as it is (`bsp`): a scheme that moves "
            "samples within the step can be faster. A claim of `hybrid` takes "
            f"{percent(board.contest.move_cost)} % of its step."
        )


def _table(board: Leaderboard, table: _Table) -> str:
    header, rows, words = cells(board)
    return table(header, rows, left=words)


def cells(board: Leaderboard) -> tuple[Row, list[Row], int]:
    """Return names of columns, rows, and how many columns are words.

    Columns that say nothing are left out: the scheme where all is BSP, staleness and moves where
    there are none, samples per second over scenarios that are not of the same workers.
    """
    lines = board.lines
    extra = list(_extra(board))
    schemes = {line.scheme for line in lines} != {"bsp"}
    several = len(board.scenarios) > 1
    header = ["policy", *(["scheme"] if schemes else []), *board.scenarios]
    header += [*(["mean"] if several else []), *(name for name, _ in extra)]
    rows: list[Row] = [
        [
            line.policy,
            *([line.scheme] if schemes else []),
            *(percent(line.regret[name]) for name in board.scenarios),
            *([percent(line.mean_regret)] if several else []),
            *(text(line) for _, text in extra),
        ]
        for line in lines
    ]
    return header, rows, 1 + schemes


def _extra(board: Leaderboard) -> Iterator[tuple[str, Callable[[BoardLine], str]]]:
    """Yield the columns past the regrets."""
    if len(board.scenarios) == 1 or not any(case.trace for case in board.contest.cases):
        yield "samples/s", lambda line: number(line.samples_per_s)
    yield "idle", lambda line: percent(line.idle_share)
    if any(line.moves_per_step for line in board.lines):
        yield "moves/step", lambda line: number(line.moves_per_step)
    if any(line.staleness for line in board.lines):
        yield "staleness", lambda line: str(line.staleness)
