"""``evenstep simulate --lengths``: plans by speed, by length and by both in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._render._words import paragraph, text_table
from ._common import names, refused
from ._contest import drawn_cases
from ._length_splits import WAYS, LengthSplits, savings, split_steps, workload_of
from ._trials import Case

STEPS = 200


@dataclass(frozen=True, slots=True)
class LengthCase:
    """A scenario with one seed, and lengths.

    Attributes:
        case: the workers.
        lengths: a name, or a file.
        padded: whether samples are padded to the longest.
        hidden_size: by which attention costs; None is the default.
    """

    case: Case
    lengths: str
    padded: bool
    hidden_size: int | None

    def play(self) -> LengthSplits:
        """Return the mean steps of all ways to split."""
        workload = workload_of(
            "simulate",
            self.case.given(),
            self.lengths,
            self.case.global_batch_size,
            padded=self.padded,
            hidden_size=self.hidden_size,
            seed=self.case.seed or 0,
        )
        return split_steps(workload)


def length_cases(
    lengths: str,
    *,
    scenario: str | None,
    world_size: int | None,
    steps: int | None,
    seeds: str | None,
    global_batch_size: int | None,
    padded: bool,
    hidden_size: int | None,
    others: dict[str, object],
) -> list[LengthCase]:
    """Return what the options ask for, with the gaps filled.

    Args:
        others: options that do not go together with lengths; None where they were left out.

    Raises:
        ValueError: something cannot be honoured; the message names the option.
    """
    for option, value in others.items():
        if value is not None:
            remedy = "Four ways to split are compared there, on scenarios by name."
            raise refused("simulate", option, "be left out with --lengths", value, remedy)
    asked = names("simulate", "--scenario", "static" if scenario is None else scenario)
    num_steps = STEPS if steps is None else steps
    cases = drawn_cases(asked, world_size, num_steps, seeds, global_batch_size)
    found = [
        LengthCase(case, name, padded, hidden_size)
        for name in names("simulate", "--lengths", lengths)
        for case in cases
    ]
    for one in {(each.lengths, each.case.name): each for each in found}.values():
        given, total = one.case.given(), one.case.global_batch_size
        workload_of("simulate", given, one.lengths, total, padded=padded, hidden_size=hidden_size)
    return found


def lengths_text(
    cases: Sequence[LengthCase], runs: Sequence[LengthSplits], width: int | None
) -> str:
    """Return the table, and what each would save alone, for a terminal."""
    found = _means(cases, runs)
    rows = [
        [way, *(f"{splits.steps_s[at] / splits.bound_s:.3f}" for splits in found.values())]
        for at, way in enumerate(WAYS)
    ]
    case = cases[0].case
    seeds = sorted({each.case.seed or 0 for each in cases})
    several = f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
    head = (
        f"Mean step time over the lower bound, {'padded' if cases[0].padded else 'packed'} "
        f"samples: {case.world_size} workers, {case.global_batch_size} samples a step, "
        f"{case.num_steps} steps, {several}"
    )
    says = [f"{name}: {savings(splits)}" for name, splits in found.items()]
    table = text_table(["", *found], rows, width=width)
    return "\n\n".join(
        [paragraph(head, width), table, "\n".join(paragraph(text, width) for text in says)]
    )


def lengths_json(cases: Sequence[LengthCase], runs: Sequence[LengthSplits]) -> dict[str, Any]:
    """Return the means and every run as plain values, times in seconds."""
    return {
        "means": {name: asdict(splits) for name, splits in _means(cases, runs).items()},
        "runs": [
            {
                "lengths": each.lengths,
                "scenario": each.case.name,
                "seed": each.case.seed,
                "global_batch_size": each.case.global_batch_size,
                "padded": each.padded,
                **asdict(splits),
            }
            for each, splits in zip(cases, runs, strict=True)
        ],
    }


def _means(cases: Sequence[LengthCase], runs: Sequence[LengthSplits]) -> dict[str, LengthSplits]:
    """Return the mean over seeds, by lengths, and by scenario where there are several."""
    several = len({each.case.name for each in cases}) > 1
    found: dict[str, list[LengthSplits]] = {}
    for each, splits in zip(cases, runs, strict=True):
        name = Path(each.lengths).stem + (f" {each.case.name}" if several else "")
        found.setdefault(name, []).append(splits)
    return {name: LengthSplits.mean(some) for name, some in found.items()}
