"""Ranks that ended their run before the others: by their own will, or by an exception."""

from __future__ import annotations

from dataclasses import dataclass

from ..exceptions import WorkerLostError
from ._peer import Message

_MOST_CHARACTERS = 300  # of an exception's message: it goes into another error's


@dataclass(frozen=True, slots=True)
class Departure:
    """What a rank said when it ended its run.

    Attributes:
        rank: who is to blame: the rank itself, or the one that it lost.
        last_step: the last step that it reported.
        failure: what ended it, in words that follow "Rank 1 on node7 was lost: "; empty if
            nothing did.
    """

    rank: int
    last_step: int
    failure: str = ""

    @classmethod
    def of(cls, peer: int, message: Message) -> Departure:
        """Return what the goodbye of ``peer`` says."""
        rank, failure = message.get("failed", (peer, ""))
        return cls(rank, message["bye"], failure)

    def problem(self, others: str) -> str:
        """Return why those who still need the rank cannot go on.

        Args:
            others: what they do meanwhile, such as "others are at 7".
        """
        if self.failure:
            return self.failure
        return f"it ended its run after step {self.last_step}, {others}"


def failure_of(error: BaseException, rank: int, last_step: int) -> tuple[int, str] | None:
    """Return who is to blame for the end of a script, and how it ended; None if it did well.

    Args:
        error: what the script ended with.
        rank: this process.
        last_step: the last step that it reported.
    """
    if isinstance(error, SystemExit) and not error.code:
        return None
    if isinstance(error, WorkerLostError) and error.rank != rank:
        return error.rank, f"rank {rank} lost it, and ended its run"
    return rank, f"it raised {in_words(error)} after step {last_step}"


def in_words(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, not too long."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # anybody's class
        lines = []
    text = lines[0] if lines else ""
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
