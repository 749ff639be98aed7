"""One rank's reading of a stream: in order, a little ahead, and in the user's loader workers."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ...._types import IntArray
from ._chunks import Chunk, ChunkRows, Collation, Packed, SamplePlace, pack, rows_of
from ._torch_loader import inner_loader, pinning


def no_length(sample: Any) -> int:
    """Return 0, where samples are counted."""
    return 0


@final
class StreamReader:
    """Reads samples ahead and hands them out in the order in which torch's loader has them.

    Without workers, that is the stream's own. With several, each runs the stream for itself and
    yields ``chunk`` samples at a time, in turn, as the batches of torch's loader come.

    Args:
        loader: the user's.
        chunk: samples that a worker reads in one go.
        prefetch: chunks that a worker reads ahead.
        length_of: returns the length of a sample, where the samples are read; by default it is 0.

    Attributes:
        ended: whether there are no more than those in stock.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        chunk: int,
        prefetch: int,
        length_of: Callable[[Any], int] = no_length,
    ) -> None:
        self._loader = loader
        self._collation = Collation.of(loader.collate_fn)
        self._batch_of = pinning(loader, self._collation.batch)
        self._generator = torch.Generator()
        self._length_of = length_of
        worker = partial(_packed, self._collation.merge, length_of)
        self._inner = _inner(loader, worker, self._generator, chunk, prefetch)
        self._chunks: Iterator[Any] = iter(())
        self._places: deque[SamplePlace] = deque()  # read and not handed out, oldest first
        self._lengths: deque[int] = deque()  # of these
        self._spare: Chunk | None = None  # that begins with the stream's first sample
        self.ended = True

    @property
    def stock(self) -> int:
        """How many samples were read and not handed out."""
        return len(self._places)

    def begin(self, seed: int) -> None:
        """Start the stream anew, with workers seeded by ``seed``."""
        self.end()
        self._generator.manual_seed(seed)
        self._chunks, self._spare, self.ended = iter(self._inner), None, False

    def ensure(self, num_samples: int) -> None:
        """Read until ``num_samples`` are in stock or the stream ends."""
        while self.stock < num_samples and not self.ended:
            try:
                content = next(self._chunks)
            except StopIteration:
                self.ended = True
                return
            if self._loader.num_workers:
                content, lengths = content
            else:
                content, lengths = [content], [self._length_of(content)]
            self._places.extend((content, row) for row in range(len(lengths)))
            self._lengths.extend(lengths)
            if self._spare is None:
                # Apart from what is handed out, as a `collate_fn` may change its samples.
                self._spare = copy.deepcopy(content) if isinstance(content, list) else content

    def skip(self, num_samples: int) -> None:
        """Read past ``num_samples``, of which the stream has as many."""
        left = num_samples
        while left:
            self.ensure(1)
            if not self.stock:
                raise RuntimeError(
                    f"the stream ended before the {num_samples} samples that the checkpoint had "
                    "trained on: it is not the stream of back then. Give it the same files, seed "
                    "and epoch, and the loader the same workers."
                )
            skipped = min(left, self.stock)
            self._drop(skipped)
            left -= skipped

    def lengths(self, num_samples: int) -> IntArray:
        """Return the lengths of the next samples."""
        return np.array(list(islice(self._lengths, num_samples)), np.int64)

    def take(self, num_samples: int, forwards: Sequence[IntArray]) -> list[Any]:
        """Return batches of some of the next ``num_samples``, which are then gone.

        Each has the samples that ``forwards`` says, counted from the next one. One without any gets
        the first sample of the stream to stand in.
        """
        batches, places = [], list(islice(self._places, num_samples))
        for slots in forwards:
            rows = rows_of(places[slot] for slot in slots) if len(slots) else [self._stand_in()]
            batches.append(self._batch_of(rows))
        self._drop(num_samples)
        return batches

    def repeated(self, size: int) -> Any:
        """Return a batch of the stream's first sample, ``size`` times."""
        return self._collation.batch([self._stand_in() for _ in range(size)])

    def mark(self) -> int:
        """Return a number made of the stream's first sample, -1 for no number, -2 for no sample."""
        if self._spare is None:
            return -2
        try:
            first = self._spare
            packed = pack(first if isinstance(first, list) else first.unpack(copy=False))
        except Exception:  # it cannot be sent anywhere, and need not be
            return -1
        number = zlib.crc32(packed.structure)
        for buffer in packed.buffers:
            view = buffer if isinstance(buffer, bytearray) else buffer.numpy().data
            number = zlib.crc32(view, number)
        return number

    def end(self) -> None:
        """Let go of the stream, wherever it stands."""
        self._chunks = iter(())  # torch's workers end with their last reference
        self._places.clear()
        self._lengths.clear()
        self.ended = True

    def close(self) -> None:
        """Stop persistent workers too."""
        self.end()
        self._inner._iterator = None

    def _stand_in(self) -> ChunkRows:
        spare = self._spare
        assert spare is not None, "a stream without a single sample is refused before"
        return ChunkRows(copy.deepcopy(spare) if isinstance(spare, list) else spare, 0, 1)

    def _drop(self, num_samples: int) -> None:
        for _ in range(num_samples):
            self._places.popleft()
            self._lengths.popleft()


class _ShownDataset(IterableDataset[Any]):
    """The user's stream where workers look for it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def _packed(
    merge: Callable[[list[Any]], Any] | None, length_of: Callable[[Any], int], samples: list[Any]
) -> tuple[Packed, list[int]]:
    """Return what a worker makes of the samples it has read, and their lengths."""
    lengths = [length_of(sample) for sample in samples]
    return pack(merge(samples) if merge else samples), lengths


def _inner(
    loader: DataLoader[Any],
    worker: Callable[[list[Any]], Any],
    generator: torch.Generator,
    chunk: int,
    prefetch: int,
) -> DataLoader[Any]:
    """Return torch's own loader over the stream, set up as the user's, that gives samples."""
    if loader.num_workers == 0:
        return inner_loader(loader, loader.dataset, generator)
    return inner_loader(
        loader,
        _ShownDataset(loader.dataset),
        generator,
        batch_size=chunk,
        collate_fn=worker,
        prefetch_factor=prefetch,
        persistent_workers=loader.persistent_workers,
        timeout=loader.timeout,
    )
