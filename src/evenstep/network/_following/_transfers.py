"""What went from rank to rank in one exchange, and how long that took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from ..._types import FloatArray
from ...exceptions import invalid


@final
@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Bytes and seconds of everything that went from one rank (row) to another (column).

    Attributes:
        num_bytes: bytes that arrived, 0 where nothing was sent, ``(world_size, world_size)``.
        seconds: for how long any of them were under way: from when both ends could have begun
            until they were there, summed over chunks but each moment once. Pauses between chunks
            do not count, as their lengths say nothing about links, ``(world_size, world_size)``.
        busy_s: for how long each rank's link was in use, up and down, 0 where not known,
            ``(2, world_size)``; None if it is known of none.

    Raises:
        ValueError: the first two are no square arrays of the same size, or the third has not two
            rows of as many ranks.
    """

    num_bytes: FloatArray
    seconds: FloatArray
    busy_s: FloatArray | None = None

    def __post_init__(self) -> None:
        shape = self.num_bytes.shape
        if len(shape) != 2 or shape[0] != shape[1] or self.seconds.shape != shape:
            got = f"{shape} and {self.seconds.shape}"
            rule, remedy = "be two square arrays of the same size", "Give a row per sender."
            raise invalid("Transfers(num_bytes=..., seconds=...)", rule, got, remedy)
        if self.busy_s is not None and self.busy_s.shape != (2, len(self.num_bytes)):
            rule, remedy = f"have shape (2, {len(self.num_bytes)})", "Give a row per direction."
            raise invalid("Transfers(busy_s=...)", rule, self.busy_s.shape, remedy)

    @classmethod
    def from_rows(cls, world_size: int, rows: Iterable[tuple[int, int, float, float]]) -> Self:
        r"""Return the sums of single transfers, each sender, receiver, bytes and seconds.

        A row from a rank to itself is what it saw of all that came to it together: its seconds
        are those in which anything did, $b_r$. It has fewer of them than its transfers' seconds
        have in sum, $\sum_s t_{sr} = o_r b_r$, as these overlap. No rank sees the same
        of what a rank sends, since its receivers' clocks differ. That is taken to overlap as much
        as what comes to it, as where all is pushed and pulled by the same shares, and, as both
        directions are one link more often than not, half of the difference (of logarithms) to
        what came is believed:

        $$\sqrt{\frac{\sum_s t_{rs}}{o_r} \cdot b_r \frac{\sum_s n_{rs}}{\sum_s n_{sr}}}.$$
        """
        num_bytes, seconds = np.zeros((2, world_size, world_size))
        came_s = np.zeros(world_size)
        for sender, receiver, size, taken_s in rows:
            if sender == receiver:
                came_s[receiver] += taken_s
                continue
            num_bytes[sender, receiver] += size
            seconds[sender, receiver] += taken_s
        if not came_s.any():
            return cls(num_bytes, seconds)
        sent, got = both_ways(num_bytes)
        known = (came_s > 0) & (got > 0)
        overlap = divided(seconds.sum(axis=0), came_s, known, 1.0)
        gone_s = seconds.sum(axis=1) / np.maximum(overlap, 1.0)
        alike_s = divided(came_s * sent, got, known)
        return cls(num_bytes, seconds, np.stack([np.sqrt(gone_s * alike_s), came_s]))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.num_bytes)

    def lasting(self, exchange_s: float) -> Self:
        r"""Return them with the ways' seconds scaled so that the slowest rank took ``exchange_s``.

        Transfers that ran one after the other had the whole link each, so that the sum of their
        rates is more than it carries; and a token bucket that was idle lets the first bytes of
        each chunk through at once. Both concern all ranks alike, and neither lets an exchange end
        earlier than its slowest rank, which moves $\sum_r v_{sr}$ bytes at
        $\sum_r v_{sr} / t_{sr}$: its time becomes that of the exchange. Who has time to spare keeps
        its lead over it.

        Right while some link is busy from beginning to end. Otherwise, as with much latency, all
        links look slower than they are, by the part of time in which none was busy.

        Args:
            exchange_s: seconds of the exchange that they were part of, positive.
        """
        longest_s = self._longest_s()
        if not longest_s:
            return self
        return replace(self, seconds=self.seconds * (exchange_s / longest_s))

    def _longest_s(self) -> float:
        """Return the time of the slowest rank: its bytes over the sum of its transfers' rates."""
        rates = self.rates()
        return float(divided(self.moved(), rates, rates > 0).max())

    def sustained(self) -> FloatArray:
        """Return what each rank's link has certainly carried, up and down, ``(2, world_size)``.

        All that it moved over the sum of its transfers' times, as if they had run one after the
        other, or over all of the exchange if that is less. Short transfers do run one after the
        other, and each has the link to itself: the sum of their rates then says too much.
        """
        taken_s = both_ways(np.where(self.seen(1), self.seconds, 0.0))
        busy_s = np.minimum(taken_s, self._longest_s())
        return divided(self.moved(), busy_s, busy_s > 0)

    def carried(self, least_bytes: float) -> FloatArray:
        """Return what links carried while they were in use, up and down, ``(2, world_size)``.

        What a link carries if it was the limit, and less if not. 0 where that is not known, or
        over which less than ``least_bytes`` went.
        """
        if self.busy_s is None:
            return np.zeros((2, self.world_size))
        moved = self.moved()
        return divided(moved, self.busy_s, (self.busy_s > 0) & (moved >= max(least_bytes, 1)))

    def rates(self) -> FloatArray:
        """Return the summed rates of each rank's transfers, up and down, ``(2, world_size)``."""
        return both_ways(divided(self.num_bytes, self.seconds, self.seen(1)))

    def moved(self) -> FloatArray:
        """Return the bytes that went over each rank's link, up and down, ``(2, world_size)``."""
        return both_ways(np.where(self.seen(1), self.num_bytes, 0.0))

    def problem(self) -> tuple[int, str] | None:
        """Return the receiver whose figures cannot be, and what is wrong with them."""
        known = np.isfinite(self.num_bytes) & np.isfinite(self.seconds)
        good = known & (self.num_bytes >= 0) & (self.seconds >= 0)
        good &= (self.seconds > 0) | (self.num_bytes == 0)
        if good.all():
            return self._busy_problem()
        sender, receiver = np.argwhere(~good)[0].tolist()
        size, seconds = self.num_bytes[sender, receiver], self.seconds[sender, receiver]
        return receiver, f"{size} bytes from rank {sender} in {seconds} s"

    def _busy_problem(self) -> tuple[int, str] | None:
        if self.busy_s is None:
            return None
        good = (np.isfinite(self.busy_s) & (self.busy_s >= 0)).all(axis=0)
        if good.all():
            return None
        rank = int(np.argmin(good))
        return rank, f"links in use for {self.busy_s[:, rank].tolist()} s"

    def seen(self, least_bytes: float) -> NDArray[np.bool_]:
        """Return which ways between two ranks had that many bytes at least, and took time."""
        seen: NDArray[np.bool_] = (self.num_bytes >= max(least_bytes, 1)) & (self.seconds > 0)
        return seen & ~np.eye(self.world_size, dtype=np.bool_)


@final
@dataclass(frozen=True, slots=True, eq=False)
class ObservedExchange:
    """One step's exchange of gradients, as it was.

    Attributes:
        plan_epoch: the plan of shares it ran under.
        exchange_s: seconds from when all ranks could begin until the last had all sums.
        transfers: what went between ranks; None for a plain all-reduce, which does not tell.
    """

    plan_epoch: int
    exchange_s: float
    transfers: Transfers | None = None

    def problem(self) -> tuple[int, str] | None:
        """Return a rank whose figures cannot be, and what is wrong with them."""
        if not (np.isfinite(self.exchange_s) and self.exchange_s > 0):
            return 0, f"an exchange of {self.exchange_s} s"
        return None if self.transfers is None else self.transfers.problem()


def both_ways(of_pairs: FloatArray) -> FloatArray:
    """Return the sums of what is known of each sender (row) and receiver, ``(2, world_size)``."""
    return np.stack([of_pairs.sum(axis=1), of_pairs.sum(axis=0)])


def divided(
    number: FloatArray, by: FloatArray, where: NDArray[np.bool_], otherwise: float = 0.0
) -> FloatArray:
    """Return the quotient ``where`` it is known."""
    quotient: FloatArray = np.divide(number, by, out=np.full(number.shape, otherwise), where=where)
    return quotient
