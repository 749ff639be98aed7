"""Ranks that ended their run before the others: by their own will, or by an exception."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import final

from .._planner import in_words
from ..exceptions import WorkerLostError
from ._wire import Message


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


@final
class Departures:
    """Who has ended its run, as far as this rank has heard, and whether it is still needed.

    Only rank 0 hears of all of them; the others hear of rank 0.

    Args:
        changed: notified when another rank has ended its run.
        lose: counts a rank as lost, with the reason.
    """

    def __init__(self, changed: threading.Condition, *, lose: Callable[[int, str], None]) -> None:
        self._changed = changed
        self._lose = lose
        self._left: dict[int, Departure] = {}
        self._broke = False

    def __contains__(self, rank: int) -> bool:
        return rank in self._left

    def __len__(self) -> int:
        return len(self._left)

    def ranks(self) -> Set[int]:
        """Return who has ended its run."""
        return self._left.keys()

    def hear(self, peer: int, goodbye: Message) -> None:
        """Take in that ``peer`` has ended its run."""
        with self._changed:
            self._left[peer] = Departure.of(peer, goodbye)
            self._changed.notify_all()

    def collective_broke(self) -> None:
        """Blame who has ended its run, or will: a collective broke on some rank, and needs all."""
        self._broke = True
        self._blame_all()

    def look(self, ahead: int, step_without: Callable[[int], int | None]) -> None:
        """Blame those who are needed.

        Args:
            ahead: the newest step for which this rank needs all others.
            step_without: the step that waits for what only one rank could send; None if none does.
        """
        if self._broke:
            self._blame_all()
        for rank, departure in tuple(self._left.items()):
            waiting = step_without(rank)
            at = ahead if waiting is None else waiting
            if ahead > departure.last_step or waiting is not None:
                self._lose(departure.rank, departure.problem(f"others are at {at}"))

    def _blame_all(self) -> None:
        for departure in tuple(self._left.values()):
            self._lose(departure.rank, departure.problem("others had not"))


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
    when = f"after step {last_step}" if last_step >= 0 else "before the end of a step"
    return rank, f"it raised {in_words(error)} {when}"
