"""A diagnosis as the fact that a run's events record."""

from __future__ import annotations

from ..events import WaitingDiagnosed
from ._causes import Diagnosis


def diagnosed(found: Diagnosis) -> WaitingDiagnosed:
    """Return the event that tells of ``found``."""
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
