"""Exact integers: splits that end first or are in proportion, forwards, and who has which slot."""

from ._partition import Assignment as Assignment
from ._partition import partition as partition
from ._problem import Forwards as Forwards
from ._problem import WorkerCosts as WorkerCosts

__all__ = [
    "Assignment",
    "Forwards",
    "WorkerCosts",
    "partition",
]
