"""Why ranks wait for others: the causes, and the event that reports them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ..events import WaitingDiagnosed


class Cause(StrEnum):
    """Why ranks wait."""

    SLOW_WORKER = "slow worker"
    """A device or a CPU that is slower throughout; a CPU quota is said as evidence."""
    THROTTLING = "throttling"
    """It gets slower as time goes on."""
    CONTENTION = "contention"
    """It is slower at times: others use the machine as well."""
    SLOW_BACKWARD = "slow backward"
    """Slower in the backward alone."""
    INPUT = "input"
    NETWORK = "network"
    """All wait together; which rank's link it is cannot be told in plain DDP without a probe."""
    GARBAGE_COLLECTION = "garbage collection"
    CHECKPOINT = "checkpoint"
    """One rank saves while the others wait."""
    LOGGING = "logging"
    """Or whatever else the loop does on one rank alone."""
    LENGTHS = "lengths of samples"
    """The rank that draws the longest samples is another one in every step."""
    ROTATING = "rotating"
    """The slowest rank changes from step to step, and nothing that is measured says why."""
    COMPILATION = "compilation"
    MEMORY = "memory pressure"


@dataclass(frozen=True, slots=True)
class FoundCause:
    """One cause, and what it costs.

    Attributes:
        cause: what it is.
        rank: whose; None where it is no rank's in particular.
        lost_share: part of all ranks' time that others lose by it, in [0, 1]: they wait, or would
            if no slower rank hid this one. Of a cause without a rank: part of all ranks' time.
        evidence: what was measured that says so, one line.
        remedy: what to do, one line.
    """

    cause: Cause
    rank: int | None
    lost_share: float
    evidence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Who waits for whom, and why.

    Attributes:
        step: the newest step that was looked at.
        num_steps: how many were.
        step_s: seconds of one, in the mean.
        waiting_share: part of all ranks' time that is waiting for others, in [0, 1].
        explained_share: part of the waiting that the causes explain, in [0, 1].
        found: the costliest first; empty where too little is explained, or little is lost.
        no_verdict: why there is no cause, in words; empty where there are some.
    """

    step: int
    num_steps: int
    step_s: float
    waiting_share: float
    explained_share: float
    found: tuple[FoundCause, ...]
    no_verdict: str = ""


def diagnosed(found: Diagnosis) -> WaitingDiagnosed:
    """Return the event that reports ``found``."""
    causes = found.found
    return WaitingDiagnosed(
        step=found.step,
        num_steps=found.num_steps,
        step_s=found.step_s,
        waiting_share=found.waiting_share,
        explained_share=found.explained_share,
        causes=tuple(str(one.cause) for one in causes),
        ranks=tuple(-1 if one.rank is None else one.rank for one in causes),
        lost_share=tuple(one.lost_share for one in causes),
        evidence=tuple(one.evidence for one in causes),
        remedy=tuple(one.remedy for one in causes),
        no_verdict=found.no_verdict,
    )
