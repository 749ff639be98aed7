"""Where the time of a step goes, who waits for whom, and why: times in, causes out."""

from ._account import Phase as Phase
from ._account import StepAccounts as StepAccounts
from ._account import accounted as accounted
from ._account import time_by_phase as time_by_phase
from ._causes import Cause as Cause
from ._causes import Diagnosis as Diagnosis
from ._causes import FoundCause as FoundCause
from ._clues import HostClues as HostClues
from ._clues import StepClues as StepClues
from ._diagnoser import Diagnoser as Diagnoser
from ._told import diagnosed as diagnosed

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
