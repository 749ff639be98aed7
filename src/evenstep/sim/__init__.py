"""Policies on simulated workers: the same objects that train, in no time and by seed."""

from ._read_trace import read_trace as read_trace
from ._run import SimReport as SimReport
from ._run import oracle as oracle
from ._run import run as run
from ._scenarios import Scenario as Scenario
from ._scenarios import scenario as scenario
from ._workload import CurveWorkload as CurveWorkload
from ._workload import Workload as Workload

__all__ = [
    "CurveWorkload",
    "Scenario",
    "SimReport",
    "Workload",
    "oracle",
    "read_trace",
    "run",
    "scenario",
]
