"""Exact integers: splits that end first or are in proportion, forwards, and who has which slot."""

from ._allocate import allocate as allocate
from ._allocate import ends_within as ends_within
from ._allocate import makespan_s as makespan_s
from ._apportion import apportion as apportion
from ._apportion import in_proportion as in_proportion
from ._cut import cut as cut
from ._deal import Deal as Deal
from ._partition import Assignment as Assignment
from ._partition import partition as partition
from ._problem import Forwards as Forwards
from ._problem import WorkerCosts as WorkerCosts

__all__ = [
    "Assignment",
    "Deal",
    "Forwards",
    "WorkerCosts",
    "allocate",
    "apportion",
    "cut",
    "ends_within",
    "in_proportion",
    "makespan_s",
    "partition",
]
