"""The first failure of an exchange: which rank is lost, told to all, and raised everywhere."""

from __future__ import annotations

import threading
from typing import final

from ....exceptions import WorkerLostError
from ._notices import Notices
from ._plan_check import PlanMismatchError
from ._transport import AbstractTransport, PeerFailed


@final
class Failure:
    """Turns the first failure into the error of all that follows, and ends the waits of all ranks.

    Args:
        transport: carries gradients; it is broken off.
        where: in what the rank was lost, for the error.
        option: which argument says how long a rank may be slow, for the error.
    """

    def __init__(
        self,
        transport: AbstractTransport,
        *,
        where: str = "the exchange of gradients",
        option: str,
    ) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._ranks = transport.ranks
        self._where, self._option = where, option
        self._notices: Notices | None = None
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Listen to what others find out."""
        self._notices = Notices(self._transport)

    def on(self, error: BaseException) -> BaseException:
        """Return the error to raise, from any thread; the first time, tell all and break off."""
        with self._lock:
            if self.error is None:
                lost, self.error = self._judge(error)
                if self._notices is not None:
                    self._notices.tell(lost)
                self._transport.break_off()
        return self.error

    def check(self) -> None:
        """Raise what ended the exchange, if anything did.

        Raises:
            WorkerLostError: a rank was lost.
            BaseException: something else happened.
        """
        if self.error is not None:
            raise self.error

    def _judge(self, error: BaseException) -> tuple[int, BaseException]:
        """Return who is lost, or out of step, and the error to raise for it."""
        if isinstance(error, PlanMismatchError):
            return error.peer, error
        if isinstance(error, WorkerLostError) and error.rank in self._ranks:
            return self._ranks.index(error.rank), error
        if not isinstance(error, PeerFailed):
            return self._rank, error
        told = None if self._notices is None else self._notices.heard()
        teller, lost = (self._rank, error.peer) if told is None else told
        if told is None:
            problem = str(error)
        elif lost == teller:
            problem = "it stopped by itself, after an error of its own or an early end"
        elif lost == self._rank:
            problem = f"rank {self._ranks[teller]} waited in vain for this very rank"
        else:
            problem = f"rank {self._ranks[teller]} found that out"
        return lost, self._loss(self._ranks[lost], problem)

    def _loss(self, rank: int, problem: str) -> WorkerLostError:
        return WorkerLostError(
            rank,
            f"Rank {rank} was lost in {self._where}: {problem}. Restart the run from its last "
            f"checkpoint; if the rank was only slow, raise `{self._option}`.",
        )
