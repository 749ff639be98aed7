"""A loss that is not finite: every rank tells rank 0 of its own, which says so once."""

from __future__ import annotations

import threading
from typing import final

from ..events import Hook, LossNotFinite
from ._message_kinds import Message, NotFiniteTold
from ._router import Router

# Steps in a row after which it is no passing matter. One or two are what scripts skip by hand, or
# what a loss scale that has grown too far for single precision costs before it shrinks.
_PLAIN = 5
# In half precision a loss scale may be too large: torch's `GradScaler` begins with 2**16, skips
# such a step and halves it. After 16 of them it is 1, and what still overflows is the loss itself.
_HALF = 17


@final
class NotFinite:
    """One rank's side of it. Finite steps send nothing; no rank waits for an answer.

    Rank 0 looks for steps in a row, of whichever ranks: one rank's NaN is in all parameters after
    the step, and so in all ranks' losses of the next. Steps may come in any order, as devices are
    read late.

    Args:
        router: carries messages.
        emit: takes the event, on rank 0.
    """

    kinds = (NotFiniteTold,)

    def __init__(self, router: Router, *, emit: Hook) -> None:
        self._router = router
        self._emit = emit
        self._lock = threading.Lock()
        self._newest = -1  # step that this rank has told of
        self._ranks: dict[int, set[int]] = {}  # on rank 0, by step; the newest ones
        self._half: set[int] = set()  # those in which it may be the loss scale
        self._is_said = False

    def tell(self, step: int, *, is_half: bool) -> None:
        """Have rank 0 know that this rank's loss was not finite in ``step``.

        Args:
            step: in which it was not.
            is_half: whether that was seen in half precision.
        """
        if step != self._newest:  # else another backward of the same step
            self._newest = step
            self._router.to_leader(NotFiniteTold(step, is_half))

    def received(self, peer: int, message: Message) -> None:
        """On rank 0: take in that a rank's loss was not finite."""
        match message:
            case NotFiniteTold(step, is_half):
                self._take(peer, step, is_half=is_half)

    def end(self, last_step: int) -> None:
        """On rank 0: say it of a run that ends so, however short.

        Args:
            last_step: the newest one that was reported.
        """
        with self._lock:
            newest = max(self._ranks, default=-1)
            ends_so = newest >= last_step and newest in self._ranks and newest not in self._half
            event = self._say(self._first(newest)) if ends_so else None
        if event is not None:
            self._emit(event)

    def _take(self, rank: int, step: int, *, is_half: bool) -> None:
        with self._lock:
            if self._is_said:
                return
            self._ranks.setdefault(step, set()).add(rank)
            if is_half:
                self._half.add(step)
            newest = step
            while newest + 1 in self._ranks:
                newest += 1
            first = self._first(newest)
            self._forget(first - _HALF)
            most = _HALF if self._half.intersection(range(first, newest + 1)) else _PLAIN
            event = self._say(first) if newest - first + 1 >= most else None
        if event is not None:
            self._emit(event)

    def _first(self, newest: int) -> int:
        """Return the step in which the ones in a row up to ``newest`` began."""
        first = newest
        while first - 1 in self._ranks:
            first -= 1
        return first

    def _forget(self, step: int) -> None:
        """Forget what is from before ``step``."""
        for old in [old for old in self._ranks if old < step]:
            del self._ranks[old]
            self._half.discard(old)

    def _say(self, first: int) -> LossNotFinite | None:
        """Return the event; None if it was said."""
        if self._is_said:
            return None
        self._is_said = True
        return LossNotFinite(first, tuple(sorted(self._ranks[first])))
