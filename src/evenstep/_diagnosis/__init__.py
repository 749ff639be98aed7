"""Where the time of a step goes, who waits for whom, and why: times in, causes out."""

from ._account import (
    Cause,
    HostClues,
    LinkClues,
    Phase,
    StepAccounts,
    StepClues,
    accounted,
    time_by_phase,
)
from ._diagnoser import Diagnoser

__all__ = [
    "Cause",
    "Diagnoser",
    "HostClues",
    "LinkClues",
    "Phase",
    "StepAccounts",
    "StepClues",
    "accounted",
    "time_by_phase",
]
