"""A rank that will wait for others in a collective waits where a loss has a name."""

from __future__ import annotations

from .._exchange._exchange import Exchange

# From which expected wait on a rank lets itself be told of the others in Python: past what the
# news takes to travel, and past what a step varies by itself.
_LATE_S = 0.002
_LATE_SHARE = 0.03


class Settling:
    """Waits inside a backward until all ranks have reported the step, if that is expected to last.

    Where the wait is short, the news that all are done comes a moment after they are, and would
    hold up those who are in time.

    Args:
        exchange: knows who has reported.
        limit_s: longest wait; 0 for none, where collectives do not hold up the host, as on CUDA.
            After one that lasts so long in vain, there are more only if all ranks turn out to have
            reported before their collectives.
    """

    def __init__(self, exchange: Exchange, *, limit_s: float) -> None:
        self._exchange = exchange
        self._limit_s = limit_s
        self._may_settle = True
        self._in_vain = False  # whether it did in the step under way, and nobody came

    @property
    def is_on(self) -> bool:
        """Whether collectives hold up the host, so that there is something to wait for."""
        return self._limit_s > 0.0

    def settle(self, step: int, compute_s: float | None) -> None:
        """Wait for the others, who are slower than ``compute_s``.

        Raises:
            WorkerLostError: a worker was lost.
            RanksDivergedError: ranks reduced the gradients of different batches together.
        """
        if self._limit_s <= 0.0:
            return
        self._exchange.check()
        slowest_s = self._exchange.slowest_s
        if slowest_s is None or compute_s is None or not self._may_settle:
            return
        if slowest_s - compute_s > max(_LATE_S, _LATE_SHARE * compute_s):
            # Another rank may have had fewer backwards than foreseen, report only at its plan
            # point, and wait for this one in a collective of the user's: once is enough.
            self._in_vain = not self._exchange.settle(step, limit_s=self._limit_s)

    def give_up(self) -> None:
        """Wait no more: this rank's backwards cannot be foreseen, so others may wait for it."""
        self._may_settle = self._in_vain = False

    def at_plan_point(self) -> None:
        """Decide whether to go on: the wait was for somebody slow, or for one who waited here."""
        if self._in_vain:
            self._may_settle = self._exchange.all_early
            self._in_vain = False
