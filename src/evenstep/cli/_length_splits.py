"""What lengths and speeds save, each alone and both: for ``simulate`` and ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer

from .. import sim
from .._render._words import paragraph, percent, seconds, text_table
from .._types import Cluster
from ..sim import Scenario
from ..sim._sample_workload import SampleWorkload
from ..sim._scenario import DRAWN, read_lengths
from ._common import check_ends, names, refused, within
from ._plan_text import Question
from ._simulated_workers import Case, heading, progress

Lengths = Annotated[
    str | None,
    typer.Option(help=f"Lengths of samples: {', '.join(DRAWN)}, or a file with one per line."),
]
Padded = Annotated[
    bool, typer.Option("--padded", help="Samples are padded to the longest; with --lengths.")
]
HiddenSize = Annotated[
    int | None,
    typer.Option(help="A sample costs L + L**2 / (6 N); N = 0: L (default: 4096; with --lengths)."),
]
_MOST_DRAWN = 10**8  # samples of all steps: a gigabyte
_LEARNING, _COUNTED = 40, 60  # steps until costs are learnt, and those that `plan` shows
WAYS = ("equal counts", "by speed alone", "by length alone", "by both", "lower bound")


@dataclass(frozen=True, slots=True)
class LengthSplits:
    """Mean seconds of a step by the way in which its samples are split.

    Attributes:
        equal_s: as many samples for each worker.
        speed_s: counts by the workers' speeds, lengths unknown.
        length_s: by length, workers taken for equally fast.
        both_s: by length and speed.
        bound_s: what no assignment beats.
        ruled_by_sample: share of the steps whose bound is a single sample, in [0, 1].
    """

    equal_s: float
    speed_s: float
    length_s: float
    both_s: float
    bound_s: float
    ruled_by_sample: float

    @property
    def steps_s(self) -> tuple[float, ...]:
        """In the order of ``WAYS``."""
        return self.equal_s, self.speed_s, self.length_s, self.both_s, self.bound_s

    @classmethod
    def mean(cls, runs: Sequence[LengthSplits]) -> LengthSplits:
        """Return the mean over runs of as many steps."""
        means = [fmean(each) for each in zip(*(run.steps_s for run in runs), strict=True)]
        equal_s, speed_s, length_s, both_s, bound_s = means
        ruled = fmean(run.ruled_by_sample for run in runs)
        return cls(equal_s, speed_s, length_s, both_s, bound_s, ruled)

    def longer(self, overhead_s: float) -> LengthSplits:
        """Return it with ``overhead_s`` more in every step."""
        equal_s, speed_s, length_s, both_s, bound_s = [one + overhead_s for one in self.steps_s]
        return LengthSplits(equal_s, speed_s, length_s, both_s, bound_s, self.ruled_by_sample)


def workload_of(
    command: str,
    scenario: Scenario,
    lengths: str,
    global_batch_size: int,
    *,
    padded: bool,
    hidden_size: int | None,
    seed: int = 0,
) -> SampleWorkload:
    """Return a scenario's workers with lengths that are drawn, or read from a file.

    Raises:
        ValueError: there is no such file, or its lengths cannot be; the message names the option.
    """
    most, remedy = _MOST_DRAWN // scenario.num_steps, "Each sample of each step is drawn."
    within(command, "--global-batch-size", global_batch_size, 1, most, remedy)
    if hidden_size is not None:
        within(command, "--hidden-size", hidden_size, 0, 10**9, "4096 is usual, 0 is L alone.")
    if lengths not in DRAWN:
        check_ends(command, "--lengths", Path(lengths), "Write one length in each line.")
    try:
        return scenario.with_lengths(
            lengths if lengths in DRAWN else read_lengths(lengths),
            global_batch_size,
            padded=padded,
            hidden_size=4096 if hidden_size is None else hidden_size,
            seed=seed,
        )
    except OSError as error:
        rule, remedy = f"be {', '.join(DRAWN)} or a file", "Write one length in each line."
        got = f"{lengths} ({error.strerror or error})"
        raise refused(command, "--lengths", rule, got, remedy) from error
    except ValueError as error:
        raise ValueError(f"`evenstep {command} --lengths {lengths}`: {error}") from error


def split_steps(workload: SampleWorkload, *, skip: int = 0) -> LengthSplits:
    """Return what steps take by the planners of training, without the first ``skip`` of them."""
    cluster = Cluster(workload.world_size, workload.global_batch_size)
    asked = product((None, workload.lengths), ("equal", "auto"))
    runs = [sim.run(policy, cluster, workload, cost=cost) for cost, policy in asked]
    equal_s, speed_s, length_s, both_s = [float(run.step_s[skip:].mean()) for run in runs]
    bounds = [workload.lower_bound_s(step) for step in range(skip, workload.num_steps)]
    bound_s = fmean(bound_s for bound_s, _ in bounds)
    ruled = fmean(reason == "sample" for _, reason in bounds)
    return LengthSplits(equal_s, speed_s, length_s, both_s, bound_s, ruled)


def savings(splits: LengthSplits) -> str:
    """Return in a sentence or two what each would save alone."""
    saved = [percent(1 - step_s / splits.equal_s) for step_s in splits.steps_s[1:]]
    text = (
        f"Of a step with equal counts, speeds alone save {saved[0]} %, lengths alone {saved[1]} %, "
        f"both {saved[2]} %; no assignment saves more than {saved[3]} %."
    )
    if splits.ruled_by_sample >= 0.05:
        text += (
            f" In {percent(splits.ruled_by_sample)} % of the steps a single sample takes as long "
            "as the bound, so that only a shorter sample helps."
        )
    return text


def check_lengths_alone(command: str, *, padded: bool, hidden_size: int | None) -> None:
    """Raise for an option that nothing heeds without ``--lengths``."""
    if padded or hidden_size is not None:
        option = "--padded" if padded else "--hidden-size"
        remedy = "Give the lengths, or leave it out."
        raise refused(command, option, "come with --lengths", "it alone", remedy)


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


def runs_as_text(cases: Sequence[Case], runs: Sequence[LengthRun], width: int | None) -> str:
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


def runs_as_json(runs: Sequence[LengthRun]) -> dict[str, Any]:
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


def answer_lengths(
    question: Question, lengths: str | None, *, padded: bool, hidden_size: int | None
) -> LengthSplits | None:
    """Return steps with samples of such lengths, computing and overhead; None without any.

    A sample of mean cost takes what the workers' speeds say, and no step differs by luck. The
    planners of training plan them; steps count once costs are learnt.

    Raises:
        ValueError: the lengths cannot be, or do not go together with caps; the message names
            the option.
    """
    if lengths is None:
        check_lengths_alone("plan", padded=padded, hidden_size=hidden_size)
        return None
    if question.max_batch_size is not None:
        rule, remedy = (
            "be left out where batches have caps",
            "Caps count samples: leave out `--max`.",
        )
        raise refused("plan", "--lengths", rule, lengths, remedy)
    slope_s = np.tile(question.times.slope_s, (_LEARNING + _COUNTED, 1))
    fixed_s = np.array(question.times.intercept_s)
    workers = Scenario("plan", fixed_s, slope_s, np.ones_like(slope_s))
    total = question.global_batch_size
    workload = workload_of("plan", workers, lengths, total, padded=padded, hidden_size=hidden_size)
    return split_steps(workload, skip=_LEARNING).longer(question.overhead_s)


def splits_as_text(splits: LengthSplits, width: int | None) -> str:
    """Return the answer as a table and a sentence, for a terminal."""
    rows = [
        [way, seconds(step_s), f"{splits.equal_s / step_s:.2f}"]
        for way, step_s in zip(WAYS, splits.steps_s, strict=True)
    ]
    table = text_table(["with these lengths", "step", "times as fast"], rows, width=width)
    return f"{table}\n\n{paragraph(savings(splits), width)}"
