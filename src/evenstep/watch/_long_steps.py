"""Steps that last far longer than the others: said while they last, and counted at the end.

Means hide them: a pause of 45 s in 1,000 steps of 0.1 s is a third of the time, and no cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .._diagnosis import Phase
from ._step_records import RankReport, Row

# Of a step under way. Before the first is over, a step compiles, and nothing is usual.
_LEAST_S, _LEAST_FIRST_S, _TIMES = 10.0, 30.0, 10.0
# Of one that is over: what it took beyond the usual.
_LEAST_EXCESS_S, _EXCESS_TIMES, _LEAST_SHARE, _FEWEST = 0.5, 5.0, 0.01, 10
_WAITS = frozenset(phase for phase in Phase if phase >= Phase.REDUCTION)
_IN = {
    Phase.INPUT: "waiting for input",
    Phase.FORWARD: "in the forward",
    Phase.BACKWARD: "in the backward",
    Phase.OPTIMIZER: "in the optimizer",
    Phase.EVALUATION: "in an evaluation",
    Phase.CHECKPOINT: "in a checkpoint",
    Phase.REST: "in what the loop does beside",
}


def usual_s(rows: Sequence[Row]) -> float:
    """Return the median seconds of a step; 0 where none is over."""
    if not rows:
        return 0.0
    return float(np.median([sum(row[0].spent_us) / row[0].num_steps for row in rows])) / 1e6


def under_way(
    newest: Sequence[RankReport], usual: float, who: Sequence[str]
) -> tuple[float, str] | None:
    """Return how long the step under way has lasted, and who keeps the others waiting in it.

    None while it is not far longer than usual. A pause that all ranks share keeps none waiting.

    Args:
        newest: the newest report of each rank.
        usual: seconds of a step; 0 before one is over.
        who: names of the ranks.
    """
    lasted_s = min(report.lasted_s for report in newest)
    if lasted_s < (max(_LEAST_S, _TIMES * usual) if usual else _LEAST_FIRST_S):
        return None
    waiting = [rank for rank, report in enumerate(newest) if report.phase in _WAITS]
    at_work = [rank for rank in range(len(newest)) if rank not in waiting]
    if not waiting:
        return None
    step = min((newest[rank].step for rank in at_work), default=newest[0].step)
    late = [rank for rank in at_work if newest[rank].step == step]
    found = "; ".join(f"{who[rank]} is {_IN[Phase(newest[rank].phase)]}" for rank in late[:4])
    said = f"{found}, and others wait" if late else "all ranks wait for each other"
    against = f", and {usual:.2g} s is usual" if usual else ""
    return lasted_s, f"step {step} has lasted {lasted_s:.0f} s{against}: {said}"


def long_steps(rows: Sequence[Row], who: Sequence[str]) -> list[str]:
    """Return who kept the others waiting in single steps that were far longer than usual.

    By rank and phase, in sentences. The first row is left out, which warms up.

    Args:
        rows: of the run.
        who: names of the ranks.
    """
    if len(rows) < _FEWEST:
        return []
    _, *known = rows
    num_steps = np.array([row[0].num_steps for row in known])[:, None, None]
    spent_s = np.array([[one.spent_us for one in row] for row in known]) / 1e6
    more_s = spent_s - num_steps * np.median(spent_s / num_steps, axis=0)  # (rows, ranks, phases)
    lasted_s = spent_s.sum(axis=2).max(axis=1)
    usual = float(np.median(lasted_s / num_steps[:, 0, 0]))
    excess_s = lasted_s - num_steps[:, 0, 0] * usual
    waited_s = more_s[:, :, Phase.REDUCTION :].sum(axis=2).max(axis=1)
    own_s = more_s[:, :, : Phase.REDUCTION]
    found: defaultdict[tuple[int, Phase], list[int]] = defaultdict(list)
    for at in np.flatnonzero(excess_s >= max(_LEAST_EXCESS_S, _EXCESS_TIMES * usual)):
        rank, phase = np.unravel_index(own_s[at].argmax(), own_s[at].shape)
        if min(waited_s[at], own_s[at, rank, phase]) >= excess_s[at] / 2:
            found[int(rank), Phase(int(phase))].append(int(at))
    said = []
    for (rank, phase), all_at in sorted(found.items(), key=lambda one: -excess_s[one[1]].sum()):
        share = excess_s[all_at].sum() / lasted_s.sum()
        longest = max(all_at, key=lambda at: float(excess_s[at]))
        step, took_s = known[longest][0].step, usual + excess_s[longest]
        others = f" ({len(all_at)} steps were long so)" if len(all_at) > 1 else ""
        if share >= _LEAST_SHARE:
            said.append(
                f"step {step} took {took_s:.2g} s, where {usual:.2g} s is usual{others}: "
                f"{who[rank]} was {_IN[phase]}, and others waited, {100 * share:.0f} % of the run"
            )
    return said
