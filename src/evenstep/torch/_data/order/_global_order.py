"""One order of the whole data set for each epoch, drawn on rank 0 by the user's own sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from ...._types import IntArray
from ....exceptions import invalid
from .._protocols import ANEW, Collectives, LoaderRanks, ShareInts
from ..deal._plans import EpochSteps
from ._drawing import (
    Chance,
    Draws,
    GlobalBatches,
    OrderBlocks,
    blocks_of,
    check_order,
    has_own_batches,
    integers,
    length_of,
)

_LEAST_BLOCK = 1 << 14
_BLOCK_STEPS = 64  # more than loader workers fetch ahead
_ENDLESS = 1 << 62  # indices: more than a run trains on
_MADE, _FAILED = 0, 1  # what a message begins with


Agree = Callable[[int, Callable[[], IntArray]], IntArray]
"""Makes a message, by its number, on rank 0 and returns it on all ranks, or raises on all."""


@dataclass(slots=True, eq=False)
class EpochOrder:
    """The order of one epoch, drawn in blocks on rank 0 and the same on all ranks.

    By default one of which nothing is drawn, nor ever will be.

    Attributes:
        before: the states of chance from before its draw.
        num_samples: its length.
        block_size: indices that are drawn at a time.
        agree: shares a block.
        drawing: yields those to come, on rank 0.
        blocks: those drawn and not trained on yet.
        key: identifies an order that can begin anywhere; None where the indices themselves do.
        drawn: up to where it has been drawn with a block beyond, as far as was asked for.
        number: of the epoch, from 1; 0 before the first.
        steps_taken: of it, handed out.
        steps: where they end.
    """

    before: list[int] = field(default_factory=list)
    num_samples: int = 0
    block_size: int = 1
    agree: Agree | None = None
    drawing: Iterator[IntArray] = field(default_factory=lambda: iter(()))
    blocks: OrderBlocks = field(default_factory=OrderBlocks)
    key: int | None = None
    drawn: int = 0
    number: int = 0
    steps_taken: int = 0
    steps: EpochSteps = field(default_factory=EpochSteps)

    def advance(self, position: int, end: int) -> None:
        """Draw the order up to ``end`` and a block beyond, and forget what is before ``position``.

        Every rank calls it, with the same numbers, and raises where the sampler fails on rank 0.
        """
        end, blocks = min(end + self.block_size, self.num_samples), self.blocks
        while blocks.end < end:
            assert self.agree is not None
            number = blocks.end // self.block_size
            blocks.append(self.agree(number, lambda: next(self.drawing)), position)
        is_whole = blocks.end >= self.num_samples
        self.drawn = _ENDLESS if is_whole else blocks.end - self.block_size

    def end(self) -> None:
        """Let go of the sampler's iterator, wherever it stands."""
        self.drawing = iter(())

    def state(self, position: int) -> dict[str, Any]:
        """Return what ``GlobalOrder.redraw`` takes at ``position``, the same on every rank."""
        if self.key is not None:
            return {"order": self.before, "fingerprint": self.key, "num_fingerprinted": 0}
        num_fingerprinted, fingerprint = self.blocks.checksum(position)
        return {
            "order": self.before,
            "fingerprint": fingerprint if self.before else None,
            "num_fingerprinted": num_fingerprinted,
        }


class GlobalOrder:
    """The indices of every epoch in the order in which all ranks together train on them.

    The sampler runs on rank 0 alone and once an epoch, as ranks that are seeded differently would
    draw different orders. It is drawn in blocks, as training comes near them, so an order may be
    of any length. A ``DistributedSampler`` is taken apart: its ``shuffle``, ``seed`` and epoch
    count, its sharding does not, so nothing is repeated to fill up ranks, and its ``drop_last``,
    which avoids just that, has nothing to drop. A ``batch_sampler`` is taken for one of global
    batches; one that is not torch's own is drawn as a whole, as only it knows their sizes.

    An order can be drawn again if the sampler draws from torch alone: the states of torch's
    generator and of the sampler's own are kept from before the draw. Of any other source of
    chance, a checksum shows whether the second draw was the same, up to where it was trained on.
    ``Draws`` continue at any position without those before it; a checksum of their seed is kept.

    Args:
        loader: the user's own; its data set has a length and is addressed by index.
        ranks: that train on it.
        share: the broadcast from rank 0. The first message of each order has number -1.
        global_batch_size: samples of a step; None is to refuse a ``batch_sampler``.
        block_size: indices that are drawn at a time, the same on all ranks; None is enough for
            64 steps, and the whole order without ``global_batch_size``.

    Attributes:
        sampler: what yields the order.
        batches: the same, if it is a batch sampler that is drawn as a whole; else None.
        is_endless: whether the sampler has no length: then it must never end.
        num_samples: indices in every epoch; of an endless one, or one that is drawn as a whole,
            more than a run trains on.
        steps: where those of every epoch end, but of one that is drawn as a whole.

    Raises:
        ValueError: the loader cannot be given a global order; the message names the remedy.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        ranks: LoaderRanks | Collectives,
        share: ShareInts,
        *,
        global_batch_size: int | None = None,
        block_size: int | None = None,
    ) -> None:
        check_order(loader, ranks.world_size, batches=global_batch_size is not None)
        self.sampler: Iterable[Any] = loader.sampler
        self.batches: GlobalBatches | None = None
        if global_batch_size is not None and has_own_batches(loader):
            self.sampler = own = GlobalBatches(loader.batch_sampler, global_batch_size)  # type: ignore[arg-type]
            self.batches = None if own.is_torchs else own
        self._is_root = ranks.rank == 0
        self._share = share
        self.is_endless = not hasattr(self.sampler, "__len__")
        self._unit = global_batch_size or 1
        self._most_batches = length_of(loader.dataset) or 0
        self.num_samples = self._length()
        self.steps = EpochSteps()
        if global_batch_size is not None and self.batches is None:
            self.steps = _steps_of(self.num_samples, global_batch_size, loader.drop_last)
        steps = self.num_samples if global_batch_size is None else _BLOCK_STEPS * global_batch_size
        self._block_size = block_size or max(steps, _LEAST_BLOCK)
        self._chance = Chance(self.sampler)
        self._num_drawn = 0  # orders

    def draw(self) -> EpochOrder:
        """Return the next epoch's order; every rank calls it, and raises if the sampler fails.

        Raises:
            ValueError: it has another length than the one before.
        """
        if (length := self._length()) != self.num_samples:
            raise invalid(
                "DataLoader(...)",
                f"keep the samples of an epoch that it was prepared with, {self.num_samples}",
                length,
                ANEW,
            )
        if not self._is_root and _draws_a_seed(self.sampler):
            # On rank 0 it seeds itself from torch's generator, which stays alike on all ranks.
            torch.empty((), dtype=torch.int64, device="cpu").random_()
        if isinstance(self.sampler, Draws):
            return self._begin_draws(self.sampler)
        drawn = self._drawn()
        kept: list[IntArray] = []

        def begin() -> list[int]:
            before = self._chance.written()
            if self.batches is not None:
                kept.append(next(drawn))  # the batches show their sizes
            return [0, 0, *before]

        return self._begin(chain(kept, drawn), begin)

    def redraw(
        self,
        before: list[int],
        position: int,
        *,
        fingerprint: int,
        num_fingerprinted: int,
        finished: bool = False,
    ) -> EpochOrder:
        """Return a past order from where it was left, by what ``EpochOrder.state`` gave back then.

        Every rank calls it; rank 0 alone draws what was trained on. If it is ``finished``, the
        next one is drawn right after: that of the epoch that ``set_epoch`` gave the sampler, unless
        it counts epochs itself.

        Raises:
            RuntimeError: it is not the order of back then.
        """
        if isinstance(self.sampler, Draws):
            return self._begin_draws(self.sampler, before, position, fingerprint)
        drawn = self._drawn(again=True)
        kept: list[IntArray] = []

        def begin() -> list[int]:
            epoch_then = getattr(self.sampler, "epoch", None)
            self._chance.restore(before)
            first = min(position, self.num_samples) // self._block_size * self._block_size
            is_whole = finished and self.batches is None  # else it is drawn as one
            until = max(first, self.num_samples if is_whole else num_fingerprinted)
            end = found = checksum = 0
            while end < until:
                block = next(drawn)
                found = crc32(block[: max(num_fingerprinted - end, 0)].tobytes(), found)
                if end < first:
                    checksum = crc32(block.tobytes(), checksum)
                else:
                    kept.append(block)
                end += len(block)
            _check_same(found, fingerprint)
            may_pass = epoch_then is not None and hasattr(self.sampler, "set_epoch")
            if finished and may_pass and getattr(self.sampler, "epoch", None) == before[0]:
                self.sampler.set_epoch(epoch_then)  # type: ignore[attr-defined]
            return [first, checksum, *before]

        return self._begin(chain(kept, drawn), begin)

    def whole(self) -> IntArray:
        """Return all of the next epoch's order."""
        order = self.draw()
        order.advance(0, self.num_samples)
        indices = order.blocks.indices(0, self.num_samples)
        assert indices is not None
        return indices

    def _begin(
        self, drawing: Iterator[IntArray], begin: Callable[[], list[int]], *, keyed: bool = False
    ) -> EpochOrder:
        """Begin an order on all ranks as ``begin`` does on rank 0; ``keyed`` if of ``Draws``."""
        self._num_drawn += 1
        agree = partial(self._agree, self._num_drawn)

        def message() -> IntArray:
            begun, sizes = begin(), self.batches.sizes if self.batches is not None else []
            # The states go along so that any rank can write the checkpoint.
            return np.array([len(sizes), *sizes, *begun], np.int64)

        num_sizes, *rest = agree(-1, message).tolist()
        first, checksum, *before = rest[num_sizes:]
        steps, num_samples = self.steps, self.num_samples
        if self.batches is not None:
            num_samples = sum(rest[:num_sizes])
            steps = EpochSteps(num_samples, ends=np.cumsum(rest[:num_sizes]))
        return EpochOrder(
            before,
            num_samples,
            self._block_size,
            agree,
            drawing,
            OrderBlocks(first, checksum),
            checksum if keyed else None,
            steps=steps,
        )

    def _begin_draws(
        self, draws: Draws, before: list[int] | None = None, position: int = 0, key: int = 0
    ) -> EpochOrder:
        """Begin an order of ``draws``, or continue that of ``before`` and ``key``."""
        found: list[Iterator[IntArray]] = []

        def begin() -> list[int]:
            if before is not None:
                self._chance.restore(before)
            written = self._chance.written() if before is None else before
            with self._chance.block(begins=True, again=before is not None):
                order = draws.draw()
            if before is not None:
                _check_same(order.key, key)
            first = position // self._block_size * self._block_size
            found.append(order.blocks(first, self._block_size))
            return [first, order.key, *written]

        return self._begin(chain.from_iterable(found), begin, keyed=True)

    def _drawn(self, *, again: bool = False) -> Iterator[IntArray]:
        """On rank 0: yield the blocks of an epoch."""
        if self.batches is not None:
            with self._chance.block(begins=True, again=again):
                indices = integers(self.batches.draw(self._most_batches))
            for first in range(0, len(indices), self._block_size):
                yield indices[first : first + self._block_size]
            return
        blocks = blocks_of(self.sampler, self.num_samples, self._block_size)
        for first in range(0, self.num_samples, self._block_size):
            with self._chance.block(begins=first == 0, again=again):
                block = next(blocks)
            yield block

    def _length(self) -> int:
        """Return the indices of an epoch, of a whole ``DistributedSampler`` too; or of no end."""
        if isinstance(self.sampler, DistributedSampler):
            return len(self.sampler.dataset)  # type: ignore[arg-type]
        if self.batches is None and isinstance(self.sampler, Sized):
            return len(self.sampler)
        return _ENDLESS // self._unit * self._unit

    def _agree(self, order: int, number: int, make: Callable[[], IntArray]) -> IntArray:
        """Make a message on rank 0 and return it on all ranks, or raise on all of them."""
        problem: Exception | None = None
        message: IntArray | None = None
        if self._is_root:
            try:
                message = np.concatenate([[_MADE], make()])
            except Exception as error:
                problem = error
                text = f"{type(error).__name__}: {error}".encode()
                message = np.array([_FAILED, *text], np.int64)
        agreed = self._share((order, number), message)
        if problem is not None:
            raise problem
        if agreed[0] == _FAILED:
            said = bytes(agreed[1:].tolist()).decode()
            raise RuntimeError(f"the sampler failed on rank 0: {said}")
        return agreed[1:]


def _check_same(found: int, fingerprint: int) -> None:
    if found != fingerprint:
        raise RuntimeError(
            "the sampler did not draw the order of the checkpoint again, so samples would "
            "be skipped and repeated. Give it a `torch.Generator` as its only source of "
            "chance, and the data set and seed of back then."
        )


def _steps_of(num_samples: int, global_batch_size: int, drop_last: bool) -> EpochSteps:
    """Return the steps of an epoch, of which there has to be one."""
    full, rest = divmod(num_samples, global_batch_size)
    num_steps = full + (rest > 0 and not drop_last)
    if num_steps == 0:
        least = global_batch_size if drop_last else 1
        raise invalid(
            "BalancedLoader(loader=...)",
            f"yield at least {least} samples an epoch",
            num_samples,
            "Lower the global batch size, or set `DataLoader(drop_last=False)`."
            if num_samples
            else "Give it a data set that is not empty.",
        )
    return EpochSteps(min(num_samples, num_steps * global_batch_size), global_batch_size)


def _draws_a_seed(sampler: object) -> bool:
    """Return whether a sampler takes one number from torch's generator in every epoch."""
    inner = sampler.sampler if isinstance(sampler, GlobalBatches) else sampler
    kind = type(inner)
    return (kind is RandomSampler or kind is Draws) and getattr(inner, "generator", None) is None


class LoopStart(NamedTuple):
    """Where a loop over an epoch began, or continued after another loop.

    Attributes:
        step: of the run, the next one then.
        epoch: that it is over.
        steps_taken: of that epoch before.
    """

    step: int
    epoch: EpochOrder
    steps_taken: int


def goes_on(step: int, at: EpochOrder, starts: Sequence[LoopStart]) -> tuple[EpochOrder, int]:
    """Return the epoch that a run continues with, and how many of its steps are done with.

    A loop that fetches ahead may have begun the next epoch before it used all of the last one.

    Args:
        step: the first one of the run that was handed out and not used, else the next one.
        at: the newest epoch.
        starts: of the newest loops, in their order. An epoch whose steps were not all taken, and
            that others follow, was broken off, and is over.
    """
    taken = at.steps_taken  # before it is looked for: another thread may hand out meanwhile
    ends = [*(start.step for start in starts[1:]), step + 1]
    for (first, epoch, before), end in zip(starts, ends, strict=False):
        place = before + max(step - first, 0)
        is_meant = epoch is at or (first < step and epoch.steps_taken == len(epoch.steps))
        if is_meant and step < end and place < epoch.steps_taken:
            return epoch, place
    return at, taken
