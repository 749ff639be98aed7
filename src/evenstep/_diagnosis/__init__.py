"""Where the time of a step goes, who waits for whom, and why: times in, causes out."""

from ._account import (
    Cause,
    Diagnosis,
    FoundCause,
    HostClues,
    Phase,
    StepAccounts,
    StepClues,
    accounted,
    diagnosed,
    time_by_phase,
)
from ._diagnoser import Diagnoser

__all__ = [
    "Cause",
    "Diagnoser",
    "Diagnosis",
    "FoundCause",
    "HostClues",
    "Phase",
    "StepAccounts",
    "StepClues",
    "accounted",
    "diagnosed",
    "time_by_phase",
]
