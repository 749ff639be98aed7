"""Exact integers: splits that end first or are in proportion, forwards, and who has which slot."""

from ._partition import Assignment, partition
from ._problem import Forwards, WorkerCosts

__all__ = [
    "Assignment",
    "Forwards",
    "WorkerCosts",
    "partition",
]
