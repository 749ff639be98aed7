"""What lengths and speeds save, each alone and both: for ``simulate`` and ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from .. import sim
from .._render._words import percent
from .._types import Cluster
from ..sim import Scenario
from ..sim._lengths import DRAWN, read_lengths
from ..sim._sample_workload import SampleWorkload
from ._common import check_ends, refused, within

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
