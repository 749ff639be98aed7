"""Where the time of a step goes, who waits for whom, and why: times in, causes out."""

from ._account import (
    Cause,
    Diagnosis,
    FoundCause,
    HostClues,
    LinkClues,
    Phase,
    StepAccounts,
    StepClues,
    accounted,
    diagnosed,
    time_by_phase,
)
from ._diagnoser import Diagnoser
from ._slow_links import LinkBooks, LinkFault, LinkLoads, SlowLink, slow_links

__all__ = [
    "Cause",
    "Diagnoser",
    "Diagnosis",
    "FoundCause",
    "HostClues",
    "LinkBooks",
    "LinkClues",
    "LinkFault",
    "LinkLoads",
    "Phase",
    "SlowLink",
    "StepAccounts",
    "StepClues",
    "accounted",
    "diagnosed",
    "slow_links",
    "time_by_phase",
]
