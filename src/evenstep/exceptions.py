"""Errors that say what to do next."""

from __future__ import annotations

import pathlib

__all__ = [
    "CheckpointError",
    "EvenstepWarning",
    "RanksDivergedError",
    "WorkerLostError",
    "invalid",
]


def invalid(argument: str, rule: str, got: object, remedy: str) -> ValueError:
    """Return the error for a refused argument: where, rule, value, remedy.

    Usage:
        raise invalid("Every(num_steps=...)", "be at least 1", num_steps, "Use 1 for every step.")
    """
    return ValueError(f"`{argument}` must {rule}, got {got}. {remedy}")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what is on the disk is missing, corrupt or foreign.

    Attributes:
        path: the file or folder.
    """

    def __init__(self, message: str, path: pathlib.Path) -> None:  # noqa: D107  # the class says it
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> tuple[type[CheckpointError], tuple[str, pathlib.Path]]:
        return type(self), (str(self), self.path)


class EvenstepWarning(UserWarning):
    """A request has a limit that you should know; the message says which."""


class RanksDivergedError(RuntimeError):
    """Ranks reduced the gradients of different batches together: the gradient was wrong.

    Attributes:
        rank: the rank that differs from most others.
    """

    def __init__(self, rank: int, message: str) -> None:  # noqa: D107  # the class says it
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RanksDivergedError], tuple[int, str]]:
        return type(self), (self.rank, str(self))


class WorkerLostError(RuntimeError):
    """A worker died, hung or left, and the step cannot be finished without it.

    Attributes:
        rank: the rank that was lost.
    """

    def __init__(self, rank: int, message: str) -> None:  # noqa: D107  # the class says it
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[int, str]]:
        return type(self), (self.rank, str(self))
