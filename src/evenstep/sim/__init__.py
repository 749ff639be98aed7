"""Policies on simulated workers: the same objects that train, in no time and by seed."""

from ._comm import AbstractComm as AbstractComm
from ._comm import ConstantComm as ConstantComm
from ._comm import NoComm as NoComm
from ._comm import OverlappedComm as OverlappedComm
from ._curves import CurveWorkload as CurveWorkload
from ._report import SimReport as SimReport
from ._run import oracle as oracle
from ._run import oracle_on as oracle_on
from ._run import run as run
from ._run import run_on as run_on
from ._scenario import Scenario as Scenario
from ._scenarios import scenario as scenario
from ._scenarios import scenario_names as scenario_names
from ._scheme_names import scheme_by_name as scheme_by_name
from ._trace import read_trace as read_trace
from ._trial import Standing as Standing
from ._trial import Trial as Trial
from ._trial import standings as standings
from ._trial import trial as trial
from ._workload import AbstractWorkload as AbstractWorkload
from ._workload import Workload as Workload

__all__ = [
    "AbstractComm",
    "AbstractWorkload",
    "ConstantComm",
    "CurveWorkload",
    "NoComm",
    "OverlappedComm",
    "Scenario",
    "SimReport",
    "Standing",
    "Trial",
    "Workload",
    "oracle",
    "oracle_on",
    "read_trace",
    "run",
    "run_on",
    "scenario",
    "scenario_names",
    "scheme_by_name",
    "standings",
    "trial",
]
