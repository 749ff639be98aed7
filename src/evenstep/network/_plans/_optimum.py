"""The shares with which the exchange ends first."""

from __future__ import annotations

from collections.abc import Sequence

from ..._types import FloatArray
from ._aggregation import Aggregation
from ._bandwidths import Links, check_world
from ._closed_form import alone, lower_bound_s, overlapped
from ._duration import exchange_s
from ._linear_program import solve_shares

# What counts as no slower: than the bound, which is exact up to rounding, and than the program's
# answer, which the solver finds to 1e-7 or so.
NEAR, SOLVED = 1 + 1e-9, 1 + 1e-6


def equal_shares(aggregation: Aggregation) -> FloatArray:
    """Return the same share for every server, ``(world_size,)``."""
    shares: FloatArray = aggregation.is_server / aggregation.is_server.sum()
    return shares


def optimal_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    r"""Return shares of the least ``exchange_s``, ``(world_size,)``.

    Equal shares, the closed forms of an overlapped exchange and of a push alone are tried in this
    order. Whose time is that of ``lower_bound_s`` is optimal; if none is, a linear program is
    solved, and the first as good as its answer is returned. So equal links have equal shares,
    and scipy is needed only where the bound does not settle it: for two or more chunks on unequal
    links, behind a barrier on links that are not as fast both ways, and for pairs of workers that
    are slower than their ranks' links. Links as they are measured are always among these:
    ``formula_shares`` does without scipy.

    Overlapped without end, with $T = A^*$ of ``lower_bound_s``, shares are

    $$w_i \propto \frac{T b_i / V - 1}{N - 2} \text{ for workers}, \quad
    w_j \propto \frac{T b_j}{N V} \text{ for those that only serve},$$

    and dedicated servers simply have $w_j \propto b_j$. A slow worker's share may be 0: its link
    is busy with its own push and pull. Once those alone set the time, $T = V / \min b$, no shares
    are any better, and only compression, rarer exchange or leaving the rank out is.

    Behind a barrier, collocated on links as fast both ways, **equal shares are optimal**, however
    unequal the links: an uneven share fills one direction and leaves the other idle, which only
    the next chunk's push can use.

    Args:
        aggregation: what is summed, by whom, in how many chunks.
        links: their bandwidths. A server whose bandwidth was measured wrong gets a wrong share:
            with a log-normal error of 10, 25 and 50 % on all of 8 ranks, simulated times were 8, 25
            and 52 % above the optimum on average, and 67 % with equal shares.

    Raises:
        ImportError: a linear program is needed and scipy is not there.
        ValueError: the links are of other ranks.

    References:
        Derived. The bound that proves an answer, and trying formulas against it, are ours.
    """
    check_world("optimal_shares", aggregation, links)
    simple = _formulas(aggregation, links)
    found = _first_within(aggregation, links, simple, lower_bound_s(aggregation, links) * NEAR)
    if found is None:
        solved = solve_shares(aggregation, links)
        solved_s = exchange_s(aggregation, links, shares=solved)
        found = _first_within(aggregation, links, (*simple, solved), solved_s * SOLVED)
    assert found is not None  # the program's own answer at the latest
    return found


def formula_shares(aggregation: Aggregation, links: Links) -> FloatArray:
    """Return the best shares that have a formula, ``(world_size,)``: without a linear program.

    On 2880 random networks of 3 to 8 ranks they took 0 to 0.3 % longer than the best in the median,
    and 9 %, 7 %, 2 % and 0.4 % at most, with 2, 4, 16 and 64 chunks.

    Raises:
        ValueError: the links are of other ranks.
    """
    check_world("formula_shares", aggregation, links)
    simple = _formulas(aggregation, links)
    return min(simple, key=lambda shares: exchange_s(aggregation, links, shares=shares))


def _formulas(aggregation: Aggregation, links: Links) -> tuple[FloatArray, ...]:
    return (
        equal_shares(aggregation),
        overlapped(aggregation, links).shares(),
        alone(aggregation, links, pushes=True).shares(),
    )


def _first_within(
    aggregation: Aggregation, links: Links, candidates: Sequence[FloatArray], limit_s: float
) -> FloatArray | None:
    for shares in candidates:
        if exchange_s(aggregation, links, shares=shares) <= limit_s:
            return shares
    return None
