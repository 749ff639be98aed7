"""What sharing out the aggregation by links brings: `sudo python -m benchmarks.network`.

Real processes over shaped links of one machine (`evenstep.lab`): Linux and root only. An exchange
lasts from a barrier, all ranks ready, until the last rank has all sums. Contestants take turns
exchange by exchange, and every result is compared with a sum in rank order. Bounds and models are
those of `evenstep.network` on the links as they are shaped, headers apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks._common import Row, main, progress
from benchmarks._network_changing import EXCHANGES, NUM_SERVERS, raced
from benchmarks._network_lab import in_lab, no_lab
from evenstep.network import Aggregation, Links, Split, exchange_s, optimal_shares
from evenstep.network._plans._optimum import equal_shares, lower_bound_s

GOODPUT = 1448 / 1514  # bytes of a stream over those of its frames
UNEQUAL = ((200, 200, 200, 50), (200, 150, 100, 50))
PARTS = "unequal,dedicated,changing"
CHUNKS = (8, 16, 32)
NUM_ELEMENTS = 2_000_000  # 8 MB


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure on unequal links, to dedicated servers, and on links that change."""
    if (missing := no_lab()) is not None:
        yield missing
        return
    rounds = 3 if options.quick else options.rounds
    parts = (options.only or PARTS).split(",")
    if "unequal" in parts:
        for mbit in UNEQUAL:
            yield from collocated(mbit, rounds)
    if "dedicated" in parts:
        yield from dedicated(rounds)
    if "changing" in parts:
        yield from raced(EXCHANGES, options)


def collocated(mbit: Sequence[float], rounds: int) -> Iterator[Row]:
    """Compare all-reduce, equal and optimal shares among workers that serve too."""
    progress(f"{len(mbit)} workers at {_text(mbit)} Mbit/s, {rounds} rounds of 7 exchanges of 8 MB")
    size, links = len(mbit), _links(mbit)
    contestants = [_contestant("all_reduce", None, 1)]
    for chunks in CHUNKS:
        aggregation = Aggregation(size, 4 * NUM_ELEMENTS, num_chunks=chunks)
        for name, shares in (
            ("equal", equal_shares(aggregation)),
            ("optimal", optimal_shares(aggregation, links)),
        ):
            contestants.append(_contestant(f"{name} {chunks}", shares, chunks))
    told = _contest(mbit, size, contestants, rounds)
    bound_s = lower_bound_s(Aggregation(size, 4 * NUM_ELEMENTS, num_chunks=None), links)
    plain = _seconds(told, "all_reduce")
    late = replace(links, latency_s=told["smallest_s"] / 2)
    for chunks in CHUNKS:
        yield _compared(told, chunks, plain, bound_s, late, _text(mbit))
    yield _bytes(told, f"collocated, {_text(mbit)} Mbit/s")
    yield _results(told, f"collocated, {_text(mbit)} Mbit/s")


def _compared(
    told: dict[str, Any],
    chunks: int,
    plain: list[float],
    bound_s: float,
    links: Links,
    mbit: str,
) -> Row:
    equal, ours = _seconds(told, f"equal {chunks}"), _seconds(told, f"optimal {chunks}")
    to_plain, to_equal = _ratio(plain, ours), _ratio(equal, ours)
    aggregation = Aggregation(links.world_size, 4 * NUM_ELEMENTS, num_chunks=chunks)
    free = Links(links.up_bytes_per_s, links.down_bytes_per_s)
    filling = exchange_s(aggregation, free, shares=optimal_shares(aggregation, free)) / bound_s
    model_s = exchange_s(aggregation, links, shares=optimal_shares(aggregation, links))
    over = median(ours) / bound_s
    met = to_plain >= 1.3 and to_equal >= 1.25
    bar = ">= 1.3x all_reduce, >= 1.25x equal shares"
    if chunks >= 16:
        bar += ", <= 1.35x the lower bound"
        met = met and over <= 1.35
    return Row(
        what=f"collocated, {mbit} Mbit/s, 8 MB in {chunks} chunks",
        bar=bar,
        measured={
            "all_reduce_s": _spread(plain),
            "equal_s": _spread(equal),
            "optimal_s": _spread(ours),
            "to_all_reduce": to_plain,
            "to_equal": to_equal,
            "bound_s": bound_s,
            "over_bound": over,
            "of_which_filling_the_pipeline": filling,
            "of_which_latency_of_chunks": model_s / (filling * bound_s),
            "of_which_not_explained": median(ours) / model_s,
        },
        met=met,
    )


def dedicated(rounds: int) -> Iterator[Row]:
    """Compare equal and optimal shares among servers that do not work."""
    mbit = (200, 200, 200, 200, 200, 100, 50)
    progress(f"4 workers at 200, servers at 200, 100 and 50 Mbit/s, {rounds} rounds of 2")
    works, links = np.arange(7) < 4, _links(mbit)
    aggregation = Aggregation(7, 4 * NUM_ELEMENTS, num_chunks=16, is_worker=works, is_server=~works)
    shares = {"equal": equal_shares(aggregation), "optimal": optimal_shares(aggregation, links)}
    contestants = [_contestant(f"{name} 16", each, 16) for name, each in shares.items()]
    told = _contest(mbit, 4, contestants, rounds)
    equal, ours = _seconds(told, "equal 16"), _seconds(told, "optimal 16")
    bound_s = lower_bound_s(aggregation, links)
    yield Row(
        what="dedicated servers 200/100/50 Mbit/s, 4 workers at 200, 8 MB in 16 chunks",
        bar=">= 2.0x equal shares (ideal 2.33)",
        measured={
            "equal_s": _spread(equal),
            "optimal_s": _spread(ours),
            "to_equal": _ratio(equal, ours),
            "bound_s": bound_s,
            "over_bound": median(ours) / bound_s,
        },
        met=_ratio(equal, ours) >= 2.0,
    )
    yield _bytes(told, "dedicated servers 200/100/50 Mbit/s")
    yield _results(told, "dedicated servers 200/100/50 Mbit/s")


def _bytes(told: dict[str, Any], where: str) -> Row:
    """Compare what interfaces sent with what plans say, host by host."""
    over: dict[str, list[float]] = {}
    for name, taken in told["taken"].items():
        if taken[0]["planned_bytes"] is None:
            continue
        sent = np.median([one["sent_bytes"] for one in taken], axis=0)
        planned = np.array(taken[0]["planned_bytes"]) / GOODPUT
        over[name] = (sent / planned).round(4).tolist()
    worst = max(abs(ratio - 1) for ratios in over.values() for ratio in ratios)
    return Row(
        what=f"bytes sent by every host, {where}",
        bar="within 5 % of the plan's, with 66 bytes of headers for 1448",
        measured={"furthest": worst, **over},
        met=worst <= 0.05,
    )


def _results(told: dict[str, Any], where: str) -> Row:
    """Compare results with a sum in rank order."""
    shares = [one for name, taken in told["taken"].items() for one in taken if one["planned_bytes"]]
    apart = max((one["apart"] for one in told["taken"].get("all_reduce", [])), default=None)
    exact = all(one["exact"] for one in shares)
    return Row(
        what=f"results, {where}",
        bar="by any shares bitwise a sum in rank order, all_reduce within 1e-6 of it",
        measured={"exchanges": len(shares), "bitwise": exact, "all_reduce_apart": apart},
        met=exact and (apart is None or apart <= 1e-6),
    )


def _contest(
    mbit: Sequence[float], num_workers: int, contestants: list[dict[str, Any]], rounds: int
) -> dict[str, Any]:
    settings = {"job": "contest", "num_workers": num_workers, "num_elements": NUM_ELEMENTS}
    return in_lab(mbit, {**settings, "contestants": contestants, "rounds": rounds})


def _contestant(
    name: str, shares: np.ndarray[Any, np.dtype[np.float64]] | None, chunks: int
) -> dict[str, Any]:
    parts = None if shares is None else Split.of(shares).parts
    return {"name": name, "parts": parts, "num_chunks": chunks}


def _links(mbit: Sequence[float]) -> Links:
    """Return links of so many Mbit/s, headers included."""
    return Links(np.array(mbit) * 125_000 * GOODPUT)


def _seconds(told: dict[str, Any], name: str) -> list[float]:
    return [one["seconds"] for one in told["taken"][name]]


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return median(one) / median(other)


def _spread(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return median, least and most."""
    return median(seconds), min(seconds), max(seconds)


def _text(mbit: Sequence[float]) -> str:
    return ",".join(f"{rate:g}" for rate in mbit)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add rates, repetitions, and what to leave out."""
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds of fixed links")
    parser.add_argument("--only", default=PARTS, help="which rows, with commas")
    parser.add_argument("--seeds", type=int, default=5, help="of links that change")
    parser.add_argument("--every-s", type=float, default=20.0, help="each has of a draw of links")
    parser.add_argument("--redraws", type=int, default=3, help="of each seed, the first included")
    parser.add_argument("--kind", choices=NUM_SERVERS, help="of links that change, one of both")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
