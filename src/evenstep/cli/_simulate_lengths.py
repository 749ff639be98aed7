"""``evenstep simulate --lengths``: plans by speed, by length and by both in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._render._words import paragraph, text_table
from ._common import names
from ._length_splits import WAYS, LengthSplits, savings, split_steps, workload_of
from ._simulated_workers import Case, heading, progress


@dataclass(frozen=True, slots=True)
class LengthRun:
    """Mean steps of some workers with samples of some lengths.

    Attributes:
        lengths: a name, or a file.
        scenario, seed, global_batch_size: of the case.
        padded: whether samples are padded to the longest.
        splits: by way to split.
    """

    lengths: str
    scenario: str
    seed: int | None
    global_batch_size: int
    padded: bool
    splits: LengthSplits


def run_lengths(
    cases: Sequence[Case], lengths: str, *, padded: bool, hidden_size: int | None
) -> list[LengthRun]:
    """Return what each case takes with each kind of lengths.

    Raises:
        ValueError: something cannot be honoured; the message names the option.
    """
    asked = [(kind, case) for kind in names("simulate", "--lengths", lengths) for case in cases]
    works = [
        workload_of(
            "simulate",
            case.given,
            kind,
            case.global_batch_size,
            padded=padded,
            hidden_size=hidden_size,
            seed=case.seed or 0,
        )
        for kind, case in asked
    ]
    return [
        LengthRun(
            kind, case.given.name, case.seed, case.global_batch_size, padded, split_steps(work)
        )
        for (kind, case), work in zip(progress(asked), works, strict=True)
    ]


def lengths_text(cases: Sequence[Case], runs: Sequence[LengthRun], width: int | None) -> str:
    """Return the table, and what each would save alone, for a terminal."""
    found = _means(runs)
    rows = [
        [way, *(f"{splits.steps_s[at] / splits.bound_s:.3f}" for splits in found.values())]
        for at, way in enumerate(WAYS)
    ]
    kind = "padded" if runs[0].padded else "packed"
    head = f"Mean step time over the lower bound, {kind} samples: {heading(cases)}"
    says = [paragraph(f"{name}: {savings(splits)}", width) for name, splits in found.items()]
    table = text_table(["", *found], rows, width=width)
    return "\n\n".join([paragraph(head, width), table, "\n".join(says)])


def lengths_json(runs: Sequence[LengthRun]) -> dict[str, Any]:
    """Return the means and every run as plain values, times in seconds."""
    entries = [asdict(run) for run in runs]
    return {
        "means": {name: asdict(splits) for name, splits in _means(runs).items()},
        "runs": [entry | entry.pop("splits") for entry in entries],
    }


def _means(runs: Sequence[LengthRun]) -> dict[str, LengthSplits]:
    """Return the mean over seeds, by lengths, and by scenario where there are several."""
    several = len({run.scenario for run in runs}) > 1
    found: dict[str, list[LengthSplits]] = {}
    for run in runs:
        name = Path(run.lengths).stem + (f" {run.scenario}" if several else "")
        found.setdefault(name, []).append(run.splits)
    return {name: LengthSplits.mean(some) for name, some in found.items()}
