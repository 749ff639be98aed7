"""What ``evenstep plan`` says of links: all-reduce, equal shares and the best ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from .._render._words import number, paragraph, percent, seconds, text_table
from .._types import FloatArray
from ..network import Aggregation, Links, optimal_shares
from ..network._plans._optimum import equal_shares
from ..network.sim import SharedLinksComm
from ._common import numbers, refused, spread, within
from ._plan_text import Question

MBIT = 125_000
_MOST_CHUNKS = 10_000  # they are exchanged one by one

Mbit = Annotated[
    str | None,
    typer.Option(help="Mbit/s of each worker's link, one number or one per worker."),
]
ModelMb = Annotated[
    float | None, typer.Option(help="MB of gradients that a step sums; with --mbit.")
]
Chunks = Annotated[
    int, typer.Option(help="Number of chunks that gradients are sent in; with --mbit.")
]
Overlap = Annotated[
    float, typer.Option(help="Part of computing in which gradients are sent; with --mbit.")
]


@dataclass(frozen=True, slots=True, eq=False)
class LinkAnswer:
    """Steps with the exchange of gradients counted, in seconds.

    Attributes:
        ranks: what the workers are called, ``(world_size,)``.
        mbit: what each worker's link carries, in Mbit/s, ``(world_size,)``.
        aggregation: what is summed, in how many chunks.
        overlap: part of computing during which gradients become ready.
        plain_s: balanced batch sizes and plain all-reduce.
        equal_s: balanced batch sizes and equal shares.
        best_s: balanced batch sizes and the best shares.
        best_shares: those, ``(world_size,)``.
    """

    ranks: tuple[int, ...]
    mbit: FloatArray
    aggregation: Aggregation
    overlap: float
    plain_s: float
    equal_s: float
    best_s: float
    best_shares: FloatArray


def answer_links(
    question: Question,
    batch_size: tuple[int, ...],
    *,
    mbit: str | None,
    model_mb: float | None,
    chunks: int,
    overlap: float,
    overhead_s: float,
) -> LinkAnswer | None:
    """Return what links change; None if they were not given."""
    if (mbit is None) != (model_mb is None):
        got = f"{'--mbit' if mbit else '--model-mb'} alone"
        remedy = "Write `--mbit 200,200,50 --model-mb 100` say."
        raise refused("plan", "--mbit, --model-mb", "be given together", got, remedy)
    if mbit is None or model_mb is None:
        return None
    remedy = "4 bytes a parameter: 100 for 25 million."
    within("plan", "--model-mb", model_mb, 0.001, 1e16, remedy)
    remedy = "1 is a barrier between push and pull; past 64 hardly anything changes."
    within("plan", "--chunks", chunks, 1, _MOST_CHUNKS, remedy)
    if not 0 <= overlap <= 1:
        remedy = "0 exchanges at the end, 0.67 during the backward."
        raise refused("plan", "--overlap", "be in [0, 1]", overlap, remedy)
    size = question.times.world_size
    given = spread("plan", "--mbit", numbers("plan", "--mbit", mbit), size, like="the plan")
    links = Links(np.array(given) * MBIT)
    aggregation = Aggregation(size, round(model_mb * 250_000) * 4, num_chunks=chunks)
    shares, compute_s = optimal_shares(aggregation, links), question.times.seconds(_of(batch_size))
    plain_s, equal_s, best_s = (
        SharedLinksComm(aggregation, links, each, overlap)(compute_s) + overhead_s
        for each in (None, equal_shares(aggregation), shares)
    )
    return LinkAnswer(
        question.ranks, np.array(given), aggregation, overlap, plain_s, equal_s, best_s, shares
    )


def links_text(answer: LinkAnswer, width: int | None = None) -> str:
    """Return the answer in words and tables, for a terminal of ``width`` columns or of any."""
    megabytes = number(answer.aggregation.num_bytes / 1e6)
    rows = [
        [name, seconds(step_s), f"{answer.plain_s / step_s:.2f}"]
        for name, step_s in (
            ("balanced, plain all-reduce", answer.plain_s),
            ("balanced, equal shares", answer.equal_s),
            ("balanced, best shares", answer.best_s),
        )
    ]
    workers = [
        [str(rank), number(float(mbit)), f"{100 * share:.0f} %"]
        for rank, mbit, share in zip(answer.ranks, answer.mbit, answer.best_shares, strict=True)
    ]
    names = [f"with {megabytes} MB of gradients", "step", "times as fast"]
    steps = text_table(names, rows, width=width)
    each = text_table(["worker", "Mbit/s", "best share"], workers, width=width)
    return "\n\n".join([steps, each, paragraph(_verdict(answer), width)])


def links_json(answer: LinkAnswer) -> dict[str, Any]:
    """Return the answer as plain values, times in seconds and shares as fractions of 1."""
    return {
        "mbit": answer.mbit.tolist(),
        "num_bytes": answer.aggregation.num_bytes,
        "num_chunks": answer.aggregation.num_chunks,
        "overlap": answer.overlap,
        "plain_s": answer.plain_s,
        "equal_s": answer.equal_s,
        "best_s": answer.best_s,
        "best_shares": answer.best_shares.tolist(),
    }


def _verdict(answer: LinkAnswer) -> str:
    saved = 1 - answer.best_s / answer.plain_s
    if saved < 0.01:
        return "No shares are faster than plain all-reduce on these links."
    return f"The best shares make a step {percent(saved)} % shorter than plain all-reduce does."


def _of(batch_size: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(batch_size, np.int64)
