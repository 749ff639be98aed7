"""Global batches that fill a budget of tokens, in the place of a number of samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np
from torch.utils.data import Sampler

from ...._types import IntArray
from ....exceptions import invalid

_POOL = 64  # batches of samples that are sorted together, so that padding is small


@final
class TokenBatches(Sampler[list[int]]):
    r"""A ``batch_sampler`` whose every batch, over all ranks, has at most so many tokens.

    Samples come in a random order, another one in each epoch. A batch takes them as long as

    $$\sum_i \ell_i \le T \qquad \text{or, padded,} \qquad n \max_i \ell_i \le T,$$

    and the next one begins. Padded, 64 batches' samples at a time are sorted by length, and the
    batches of an epoch are put in a random order, so that little is padded and no length comes
    first.

    Right where steps are to take as long as each other, or as much memory. Each step then has
    another number of samples, and the mean over its samples another weight on each of them: with
    ``Balancer(unit="tokens")`` all tokens weigh alike within a step. Wrong for a data set whose
    lengths are not known before the batch is made.

    Args:
        lengths: of all samples, by index, at least 1, ``(num_samples,)``.
        budget: tokens of a global batch, at least the longest sample's.
        padded: whether a batch is padded to its longest sample.
        shuffle: whether the order is random; else samples come by index.
        seed: of the order, with the epoch.

    Attributes:
        epoch: sets the order. ``loader.set_epoch`` passes it on.

    Raises:
        ValueError: a length or the budget is out of range.
    """

    def __init__(
        self,
        lengths: Any,
        budget: int,
        *,
        padded: bool = False,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        known = np.asarray(lengths)
        if known.ndim != 1 or known.dtype.kind not in "iu" or not len(known) or known.min() < 1:
            raise invalid(
                "TokenBatches(lengths=...)",
                "be integers of at least 1, one for each sample",
                f"{known.dtype} of shape {known.shape}",
                "Count the tokens of each sample.",
            )
        if not budget >= known.max():
            raise invalid(
                "TokenBatches(budget=...)",
                f"be at least the length of the longest sample, {known.max()}",
                budget,
                "Raise it, or cut longer samples.",
            )
        self._lengths: IntArray = known.astype(np.int64)
        self._budget, self._padded = int(budget), padded
        self._shuffle, self._seed = shuffle, seed
        self.epoch = 0
        self._drawn: tuple[int, list[list[int]]] = (-1, [])

    @property
    def mean_size(self) -> int:
        """Samples of a batch in the mean, for ``Balancer(global_batch_size=...)``."""
        return max(round(len(self._lengths) / len(self)), 1)

    def set_epoch(self, epoch: int) -> None:
        """Draw another order from the next iteration on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def _batches(self) -> list[list[int]]:
        """Return the batches of the epoch, which are drawn once."""
        epoch, drawn = self._drawn
        if epoch != self.epoch:
            draws = np.random.default_rng((self._seed, self.epoch))
            order = np.arange(len(self._lengths))
            if self._shuffle:
                draws.shuffle(order)
            if self._padded:
                order = self._sorted_in_pools(order)
            drawn = self._filled(order)
            if self._padded and self._shuffle:
                drawn = [drawn[at] for at in draws.permutation(len(drawn))]
            self._drawn = self.epoch, drawn
        return drawn

    def _sorted_in_pools(self, order: IntArray) -> IntArray:
        pool = max(_POOL * self._budget // int(self._lengths.max()), 1)
        pools = [order[at : at + pool] for at in range(0, len(order), pool)]
        return np.concatenate([one[np.argsort(self._lengths[one], kind="stable")] for one in pools])

    def _filled(self, order: IntArray) -> list[list[int]]:
        batches: list[list[int]] = []
        tokens = longest = 0  # of the newest batch
        for index, length in zip(order.tolist(), self._lengths[order].tolist(), strict=True):
            tokens, longest = tokens + length, max(longest, length)
            size = len(batches[-1]) + 1 if batches else 0
            if not size or (size * longest if self._padded else tokens) > self._budget:
                batches.append([])
                tokens = longest = length
            batches[-1].append(index)
        return batches
