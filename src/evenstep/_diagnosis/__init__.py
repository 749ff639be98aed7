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
from ._slow_links import LinkBooks, LinkFault, LinkLoads, SlowLink, slow_links

__all__ = [
    "Cause",
    "Diagnoser",
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
    "slow_links",
    "time_by_phase",
]
