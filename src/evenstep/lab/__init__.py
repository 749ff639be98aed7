"""A cluster on one machine: hosts with CPU quotas and shaped links. Linux and root only.

Needs the extra ``lab``. Importing it imports neither pyroute2 nor torch.
"""

from ._built import clean as clean
from ._host import Host as Host
from ._host import LabUnavailable as LabUnavailable
from ._lab import Lab as Lab
from ._trace import Change as Change
from ._trace import drawn_trace as drawn_trace

__all__ = [
    "Change",
    "Host",
    "Lab",
    "LabUnavailable",
    "clean",
    "drawn_trace",
]
