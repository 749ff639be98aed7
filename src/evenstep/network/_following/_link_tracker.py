"""What went from rank to rank in one exchange, and what that says of the links."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from ..._types import FloatArray
from ...exceptions import invalid
from .._plans._aggregation import Links
from .._plans._duration import fair_transfers


@final
@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Bytes and seconds of everything that went from one rank (row) to another (column).

    Attributes:
        num_bytes: bytes that arrived, 0 where nothing was sent, ``(world_size, world_size)``.
        seconds: for how long any of them were under way: from when both ends could have begun
            until they were there, summed over chunks but each moment once. Pauses between chunks
            do not count, as their lengths say nothing about links, ``(world_size, world_size)``.
        busy_s: for how long each rank's link was in use, up and down, 0 where nothing came,
            ``(2, world_size)``.
    """

    num_bytes: FloatArray
    seconds: FloatArray
    busy_s: FloatArray

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
        rates = self.rates()
        longest_s = float(divided(self.moved(), rates, rates > 0).max())
        if not longest_s:
            return self
        return replace(self, seconds=self.seconds * (exchange_s / longest_s))

    def carried(self, least_bytes: float) -> FloatArray:
        """Return what links carried while they were in use, up and down, ``(2, world_size)``.

        What a link carries if it was the limit, and less if not. 0 of one over which less than
        ``least_bytes`` went.
        """
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
        if not good.all():
            sender, receiver = np.argwhere(~good)[0].tolist()
            size, seconds = self.num_bytes[sender, receiver], self.seconds[sender, receiver]
            return receiver, f"{size} bytes from rank {sender} in {seconds} s"
        wrong = np.flatnonzero(~(np.isfinite(self.busy_s) & (self.busy_s >= 0)).all(axis=0))
        if not len(wrong):
            return None
        return int(wrong[0]), f"links in use for {self.busy_s[:, wrong[0]].tolist()} s"

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
        transfers: what went between ranks; None for a plain all-reduce: not known.
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


WEIGHT = 0.2  # least weight of the newest exchange in the mean
SURPRISE = 0.3  # least change of a link that is no noise, as the logarithm of a ratio: a third
LEAST_BYTES = 16384  # transfers of less are left out: their latency would count as slowness
FITS = 3  # how often one exchange is explained anew by what it has taught; more change little
BELIEVED = 0.9  # of a change
NOISE_WEIGHT = 0.1
FULL = 0.95  # part of a link that makes it the limit
LITTLE = 0.4  # of the bytes of the link that had most to do
CERTAIN = 0.95  # part of what a link carried in use that it is taken for at least
ALIKE = 0.8  # rate of the slowest link over the fastest from which on they are equal but for noise
DOUBT = 0.15  # logarithm of a ratio: what a link that is not the limit may seem slower by


@final
@dataclass(frozen=True, slots=True, eq=False)
class LinkTracker:
    r"""Follows what every rank's link carries, up and down, without sending a byte of its own.

    A rank that moved 60 MB/s may have a link of 60, or one of 200 and slow partners: what a
    transfer achieved is a share of one of its two links, and does not say of which. To take it
    for what the link carries would be wrong twice: a fast rank held up by a slow one would look
    slow, and lose the share that it could have carried; one with little to do would look slow
    for that. So an exchange is compared with what the links known so far explain. With $X_{sr}$ the
    rate of each transfer if these links were shared fairly (``fair_transfers``), $x_{sr}$ as it
    was, and $u_s = \sum_r x_{sr} / \sum_r X_{sr}$ of a sender, $d_r$ likewise of a receiver:

    - A rank that sends faster than its link was thought to allow has a faster link:
      $e_s \leftarrow u_s E_s$, with $E_s$ the most it should have sent at any time.
    - Of a transfer slower than $X_{sr}$ the end is at fault that fell behind by more: the sender if
      $u_s \sqrt{d_s} \le d_r \sqrt{u_r}$, its other direction counting half. A slow link slows
      all of its transfers, and of each of its partners only one. The end at fault of most of what
      it lost is as slow as it was seen to be: $e_s \leftarrow u_s E_s$ again.
    - A link that was not expected to be full is at fault only if it fell behind by 15 %, and by
      twice the usual noise.
    - A link over which less than two fifths of the most went is taken for what it carried while it
      was in use, or before, at most (``Transfers.carried``): its short transfers had it to
      themselves one by one, or went through at once after a pause, and look faster than they are.
    - No link is found to be slower than 95 % of what came over it while anything did, and that of a
      rank that only serves to be faster than what it carried while in use.
    - A rank that is at fault of nothing keeps what was known of it, however little it moved.

    The same is done for receivers, three times over, as one change explains others. What came
    of it is averaged in logarithms, over the exchanges since the link last changed and at most
    five of them. A link has changed if it differs by more than a third, and by more than thrice
    what exchanges usually do; nine tenths of that are believed at once.

    Right for ranks with a link each, full duplex, on which many transfers run at once. What it
    cannot see: a link that nothing goes over, more capacity than any plan has asked for (found
    when one asks), and which of two ranks is slow if they have no other partner: both, then. The
    bandwidths of pairs stay as they were given, and half duplex is taken for full. An update
    takes some 10 ms for 8 ranks and 0.25 s for 32: no rank should wait for it.

    Attributes:
        links: what they are believed to carry.
        num_exchanges: that the figure of each rank rests on, up and down, ``(2, world_size)``.
        noise: usual difference of an exchange from what is believed, as the logarithm of a ratio.
    """

    links: Links
    num_exchanges: FloatArray
    noise: float

    @classmethod
    def of(cls, links: Links) -> Self:
        """Return the belief in links that were measured otherwise."""
        return cls(links, np.ones((2, links.world_size)), 0.0)

    @classmethod
    def first(cls, transfers: Transfers) -> Self:
        """Return a guess from one exchange alone: what each rank moved, summed over its transfers.

        A rank whose link was not the limit is taken for slower than it is until a plan asks more of
        it. One that nothing went to or from is taken for the mean of the others.

        Args:
            transfers: one of them at least had ``LEAST_BYTES``.
        """
        rate, _ = _rates(transfers)
        up, down = rate.sum(axis=1), rate.sum(axis=0)
        up[up == 0], down[down == 0] = up[up > 0].mean(), down[down > 0].mean()
        return cls.of(_fitted(Links(up, down), transfers, 0.0))

    def update(
        self, transfers: Transfers, *, only_serves: NDArray[np.bool_] | None = None
    ) -> LinkTracker:
        """Return what is believed after an exchange.

        Args:
            transfers: of the exchange, all ranks at once.
            only_serves: ranks without data of their own, ``(world_size,)``; None if there is none.

        Raises:
            ValueError: the transfers are of other ranks.
        """
        links = self.links
        if links.world_size != transfers.world_size:
            rule = f"speak of the {links.world_size} ranks of the links"
            got, remedy = transfers.world_size, "Give a row per rank."
            raise invalid("LinkTracker.update(transfers)", rule, got, remedy)
        before, found = _both(links), _both(_fitted(links, transfers, self.noise))
        at_least, at_most = _certain(before, transfers, only_serves)
        change = np.log(np.minimum(np.maximum(found, at_least), at_most) / before)
        limit = max(SURPRISE, 3 * self.noise)
        changed, number = abs(change) > limit, self.num_exchanges + 1
        part = np.where(changed, BELIEVED, np.maximum(WEIGHT, 1 / number))
        usual = float(np.minimum(abs(change), limit).mean())
        return LinkTracker(
            _with(links, before * np.exp(part * change)),
            np.where(changed, 1.0, number),
            self.noise + NOISE_WEIGHT * (usual - self.noise),
        )

    def changed(self, ranks: NDArray[np.bool_]) -> bool:
        """Whether the link of some of these ranks was found to have changed in the newest exchange.

        Args:
            ranks: who counts, at least one, ``(world_size,)``.
        """
        return bool((self.num_exchanges[:, ranks] <= 1).any())


def _certain(
    before: FloatArray, transfers: Transfers, only_serves: NDArray[np.bool_] | None
) -> tuple[FloatArray, FloatArray]:
    """Return what links may be taken for, at least and at most, ``(2, world_size)`` each.

    Of a link that had little to do, what is too good to be certain is believed by and by:
    shares that were planned for a link that is not there cost more than those that leave some
    of it for an exchange or two.
    """
    carried = transfers.carried(LEAST_BYTES)
    moved = transfers.moved()
    doubtful = moved < LITTLE * moved.max(axis=1, keepdims=True)
    if only_serves is not None:
        doubtful |= only_serves & (carried > 0)
    certain = np.maximum(carried, before)
    at_least = np.minimum(CERTAIN * carried, before)
    at_least[0] = 0.0  # for how long a link was in use by what it sent is known by half
    return at_least, np.where(doubtful, certain, np.inf)


def _rates(transfers: Transfers) -> tuple[FloatArray, FloatArray]:
    """Return rates and bytes of what counts, 0 elsewhere."""
    seen = transfers.seen(LEAST_BYTES)
    num_bytes = np.where(seen, transfers.num_bytes, 0.0)
    return divided(num_bytes, transfers.seconds, seen), num_bytes


def _fitted(links: Links, transfers: Transfers, noise: float) -> Links:
    """Return links that explain the exchange, as near to ``links`` as the rules allow."""
    rate, num_bytes = _rates(transfers)
    for _ in range(FITS):
        links = _explained(links, num_bytes, rate, max(DOUBT, 2 * noise))
    return links


def _explained(links: Links, num_bytes: FloatArray, rate: FloatArray, doubt: float) -> Links:
    """Return the links after the rules were applied once.

    A link that was not expected to be full may have lost little to noise, and much more would be
    made of it: all that it was not asked for.
    """
    fair_s, expected = fair_transfers(num_bytes, links)
    usual = divided(num_bytes, fair_s, num_bytes > 0)
    asked = both_ways(usual)
    ratio = divided(both_ways(rate), asked, asked > 0, 1.0)
    lost = np.maximum(usual - rate, 0.0)
    # Both directions of a rank are one link more often than not: it counts if both fell behind.
    sends, gets = ratio * np.sqrt(ratio[::-1])
    sender_fell, receiver_fell = sends[:, None] <= gets, gets <= sends[:, None]
    at_fault = np.stack([_most(lost, sender_fell, 1), _most(lost, receiver_fell, 0)])
    before, carried = _both(links), expected * ratio
    full = expected >= FULL * before
    slower = at_fault & (full | (np.log(np.maximum(ratio, 1e-9)) < -doubt))
    moved = (expected > 0) & (ratio > 0) & ((carried > before) | slower)
    return _with(links, np.where(moved, carried, before))


def _most(rate: FloatArray, by: NDArray[np.bool_], axis: int) -> NDArray[np.bool_]:
    """Return who accounts for half or more of a sum over its transfers."""
    most: NDArray[np.bool_] = 2 * np.where(by, rate, 0.0).sum(axis=axis) >= rate.sum(axis=axis)
    return most


def _both(links: Links) -> FloatArray:
    """Return what links carry up and down, ``(2, world_size)``."""
    return np.stack([links.up_bytes_per_s, links.down_bytes_per_s])


def _with(links: Links, both: FloatArray) -> Links:
    """Return the links with other bandwidths of the ranks."""
    return replace(links, up_bytes_per_s=both[0], down_bytes_per_s=both[1])


def links_apart(one: Links, other: Links) -> float:
    """Return by which part the most different link differs."""
    return float(abs(_both(one) / _both(other) - 1).max())


def links_alike(links: Links) -> bool:
    """Return whether all carry about as much, in each direction."""
    both = _both(links)
    return bool((both.min(axis=1) >= ALIKE * both.max(axis=1)).all())
