"""Policies on simulated workers: the same objects that train, in no time and by seed."""

from ._comm import AbstractComm as AbstractComm
from ._comm import ConstantComm as ConstantComm
from ._comm import NoComm as NoComm
from ._comm import OverlappedComm as OverlappedComm
from ._run import SimReport as SimReport
from ._run import oracle as oracle
from ._run import run as run
from ._workload import Workload as Workload

__all__ = [
    "AbstractComm",
    "ConstantComm",
    "NoComm",
    "OverlappedComm",
    "SimReport",
    "Workload",
    "oracle",
    "run",
]
