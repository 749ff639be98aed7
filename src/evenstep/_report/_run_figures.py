"""What a run comes to: the figures that a report shows, and nothing of how it shows them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .._types import FloatArray, IntArray
from ..events import LinksMeasured, Rebalanced, RunStarted, SharesPlanned, StepsAccounted

PARTS = tuple(field.name for field in fields(StepsAccounted)[3:])
"""The parts of a step, in the order of ``StepsAccounted``."""


@dataclass(frozen=True, slots=True, eq=False)
class StepFigures:
    """Measured steps by stretch, and all of them together.

    Every array of the first group is ``(stretches,)`` and holds means over the steps that said it,
    NaN where none did. Those by rank are ``(stretches, world_size)``.

    Attributes:
        num: measured steps in each.
        wall_s, makespan_s: the whole step, and its slowest worker's computing.
        equal_s, best_s: what the equal and the best split would have computed.
        least_s, most_s: of whole steps; of computing where no whole step was measured.
        batch_size: of each rank, in the mean.
        samples_per_s: of each rank, its samples by its own seconds of computing.
        idle_share: what each rank waited for the slowest's computing, as a part of it.
        num_slowest: steps in which each rank was the slowest, ``(world_size,)``.
        caused_s: seconds that all others waited for each rank's computing, ``(world_size,)``.
        rank_samples, rank_compute_s: all of each rank, ``(world_size,)``.
        rank_idle_s: what each rank waited for the slowest's computing, ``(world_size,)``.
    """

    num: IntArray
    wall_s: FloatArray
    makespan_s: FloatArray
    equal_s: FloatArray
    best_s: FloatArray
    least_s: FloatArray
    most_s: FloatArray
    batch_size: FloatArray
    samples_per_s: FloatArray
    idle_share: FloatArray
    num_slowest: IntArray
    caused_s: FloatArray
    rank_samples: FloatArray
    rank_compute_s: FloatArray
    rank_idle_s: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class AccountFigures:
    """Where the time of steps went.

    Attributes:
        part_s: seconds of a step in each of ``PARTS``, mean over ranks, ``(stretches, parts)``.
        waiting_share: part of each rank's time that it waited, ``(stretches, world_size)``.
        rank_part_s: seconds of all steps, ``(world_size, parts)``.
        num_steps: steps that were accounted for.
    """

    part_s: FloatArray
    waiting_share: FloatArray
    rank_part_s: FloatArray
    num_steps: int


@dataclass(frozen=True, slots=True)
class Savings:
    """What balancing brought, and what is left to bring.

    Attributes:
        elapsed_s: of all whole steps that were measured; one without its whole time counts with
            its slowest worker's computing.
        saved_s: what the equal split would have computed for longer, in all steps that know it.
        saved_share: the same as a part of the time that the equal split would have taken, in
            steps whose whole time is known. None without any.
        left_s: what the best split would have computed for less than what was.
        idle_share: part of the ranks' computing time that they waited for the slowest.
    """

    elapsed_s: float
    saved_s: float
    saved_share: float | None
    left_s: float
    idle_share: float


@dataclass(frozen=True, slots=True)
class KnownCause:
    """A cause of waiting on one rank, over all diagnoses.

    Attributes:
        cause: such as ``"input"``.
        rank: whose; -1 for no rank's in particular.
        lost_s: seconds of the cluster's time that it cost.
        num: diagnoses that named it.
        last_step: of the newest.
        evidence, remedy: of the newest.
    """

    cause: str
    rank: int
    lost_s: float
    num: int
    last_step: int
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """Who waited for whom, by all diagnoses of a run.

    Attributes:
        causes: the costliest first.
        num: diagnoses, with a verdict or without.
        explained_share: of the waiting, mean over those with a verdict; None without any.
        no_verdict: why the newest without a verdict has none; empty where all have one.
        num_without: diagnoses without a verdict.
    """

    causes: tuple[KnownCause, ...]
    num: int
    explained_share: float | None
    no_verdict: str
    num_without: int


@dataclass(frozen=True, slots=True)
class PlanChange:
    """Other batch sizes.

    Attributes:
        event: what was decided.
        before: the sizes until then; None of a start's first plan, if it began with equal ones.
        moved_share: samples that another rank computes from then on, as a part of all.
    """

    event: Rebalanced
    before: tuple[int, ...] | None
    moved_share: float


@dataclass(frozen=True, slots=True)
class Mishap:
    """What went wrong, or what was done about it.

    Attributes:
        kind: name of the event.
        step: when.
        rank: whose; None where it is no rank's.
        text: a sentence.
        num: events of this kind on this rank.
    """

    kind: str
    step: int
    rank: int | None
    text: str
    num: int


@dataclass(frozen=True, slots=True, eq=False)
class LinkFigures:
    """Unequal links.

    Attributes:
        first, last: the first and the newest measurement of links; None without any.
        num_measured: how many there were.
        shares: the newest plans of shares, in order.
        num_shares: all of them.
        exchange_s, predicted_s: of an exchange, mean by stretch, NaN without any.
        least_s, most_s: of an exchange, by stretch.
    """

    first: LinksMeasured | None
    last: LinksMeasured | None
    num_measured: int
    shares: tuple[SharesPlanned, ...]
    num_shares: int
    exchange_s: FloatArray
    predicted_s: FloatArray
    least_s: FloatArray
    most_s: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class ReportFigures:
    """All that is reported of a run.

    Attributes:
        name: of its folder, or its file.
        start: the newest start; None where none was recorded.
        num_starts: how often training began.
        is_ended: whether the newest start came to its end.
        keeps_equal: whether the sizes were kept equal in all that was measured, as by ``Equal``.
        world_size: of the largest start.
        num_steps: measured steps.
        first_step, last_step: their range.
        edges: first step of every stretch, ``(stretches,)``.
        width: steps in a stretch.
        steps: of measured steps.
        accounts: of accounts; None without any.
        savings: in hours.
        diagnosed: causes of waiting; None without a diagnosis.
        changes: the largest, in order of steps.
        num_changes: all of them.
        changes_by_stretch: ``(stretches,)``.
        mishaps: in order of steps.
        links: None where nothing was reported of them.
        left_out: what of the file was not used, as a sentence; empty where all was.
    """

    name: str
    start: RunStarted | None
    num_starts: int
    is_ended: bool
    keeps_equal: bool
    world_size: int
    num_steps: int
    first_step: int
    last_step: int
    edges: IntArray
    width: int
    steps: StepFigures
    accounts: AccountFigures | None
    savings: Savings
    diagnosed: Diagnosed | None
    changes: tuple[PlanChange, ...]
    num_changes: int
    changes_by_stretch: IntArray
    mishaps: tuple[Mishap, ...]
    links: LinkFigures | None
    left_out: str
