"""The best shares where no formula has them, by a linear program."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._install import install_line
from ..._types import FloatArray
from ._aggregation import Aggregation
from ._bandwidths import Links, check_world
from ._closed_form import Within, overlapped
from ._duration import Phases, Rows, phases_of


def solve_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    r"""Return shares of the least ``exchange_s``, whatever the links and the chunks.

    $\min (C - 1) A + P_1 + P_2$ with every link's line in $w$ below its phase, $w \ge 0$,
    $\sum w = 1$. Without a limit to the chunks it is $\min A$, behind a barrier
    $\min P_1 + P_2$. Pairs need a row each: 128 ranks take 0.2 s or so.

    Optima tie. Where only ranks' own links limit, those returned leave every server the same part
    of its room, so they do not depend on the numbering; with pairs they are what the solver found.

    Raises:
        ImportError: scipy is not there.
        ValueError: the links are of other ranks.

    References:
        Q. Huangfu and J. Hall, *Parallelizing the dual revised simplex method* (HiGHS), 2018.
        hivemind's ``load_balancing.py`` solves the overlapped case so.
    """
    check_world("solve_shares", aggregation, links)
    optimize, sparse = _scipy()
    phases, size, chunks = phases_of(aggregation, links), links.world_size, aggregation.num_chunks
    weights = np.array([0.0, 0.0, 1.0] if chunks is None else [1.0, 1.0, chunks - 1.0])
    used = [row for row, weight in enumerate(weights) if weight > 0]
    rows = [(phases.push, phases.pull, phases.both)[row] for row in used]
    # The solver's tolerances are absolute: times of about 1, however slow an unneeded link.
    unit_s = overlapped(aggregation, links).seconds or float(rows[0].constant_s.max())
    answer = optimize.linprog(
        np.concatenate([np.zeros(size), weights[used]]),
        A_ub=sparse.vstack(
            [_matrix(sparse, each, size, len(used), i, unit_s) for i, each in enumerate(rows)],
            format="csr",
        ),
        b_ub=-np.concatenate([each.constant_s for each in rows]) / unit_s,
        A_eq=np.concatenate([aggregation.is_server, np.zeros(len(used))])[None],
        b_eq=[1.0],
        bounds=[(0, 1 if serves else 0) for serves in aggregation.is_server]
        + [(0, None)] * len(used),
        method="highs",
    )
    if not answer.success:  # bounded and feasible by construction
        raise RuntimeError(f"HiGHS found no shares: {answer.message}")
    shares = np.where(aggregation.is_server, np.maximum(answer.x[:size], 0.0), 0.0)
    found: FloatArray = shares / shares.sum()
    return (
        found if links.pair_bytes_per_s is not None else _centred(aggregation, phases, found, used)
    )


def _matrix(sparse: Any, rows: Rows, size: int, num_phases: int, phase: int, unit_s: float) -> Any:
    """Return the rows as a sparse matrix over shares and phases, ``- unit_s`` below its phase."""
    each = np.arange(len(rows.first))
    entries = np.concatenate([rows.first_s, rows.second_s]) / unit_s
    where = (np.concatenate([each, each]), np.concatenate([rows.first, rows.second]))
    shape = (len(each), size + num_phases)
    time = (np.full(len(each), -1.0), (each, np.full(len(each), size + phase)))
    return sparse.coo_array((entries, where), shape) + sparse.coo_array(time, shape)


def _centred(
    aggregation: Aggregation, phases: Phases, shares: FloatArray, used: list[int]
) -> FloatArray:
    """Return the shares that take no longer in any phase, with equal parts of the room."""
    least, most = np.zeros(len(shares)), aggregation.is_server.astype(np.float64)
    for rows in [(phases.push, phases.pull, phases.both)[phase] for phase in used]:
        spare = rows.seconds(shares) - rows.constant_s
        slope = rows.first_s
        edge = np.divide(spare, slope, out=np.zeros_like(spare), where=slope != 0)
        np.minimum.at(most, rows.first[slope > 0], edge[slope > 0])
        np.maximum.at(least, rows.first[slope < 0], edge[slope < 0])
    return Within(0.0, least, np.maximum(most, least)).shares()


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        message = (
            "Shares for these links and chunks have no closed form, and solving for them needs "
            f"scipy: `{install_line('network')}`."
        )
        raise ImportError(message) from error
    return optimize, sparse
