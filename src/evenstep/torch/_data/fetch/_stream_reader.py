"""One rank's reading of a stream: in order, a little ahead, and in the user's loader workers."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from ._chunks import ChunkRows, Collation, Packed, pack
from ._loader_workers import WorkerInit
from ._torch_loader import as_it_is, inner_loader


@final
class StreamReader:
    """Reads samples ahead and hands them out in the order in which torch's loader has them.

    Without workers, that is the stream's own. With several, each runs the stream for itself and
    yields ``chunk`` samples at a time, in turn, as the batches of torch's loader come.

    Args:
        loader: the user's.
        chunk: samples that a worker reads in one go.
        prefetch: chunks that a worker reads ahead.
        pin: moves a batch to pinned memory.

    Attributes:
        stock: samples that were read and not handed out.
        ended: whether there are no more than those.
    """

    def __init__(
        self, loader: DataLoader[Any], *, chunk: int, prefetch: int, pin: Callable[[Any], Any]
    ) -> None:
        self._loader = loader
        self._collation = Collation.of(loader.collate_fn)
        self._pin = pin
        self._generator = torch.Generator()
        self._inner = _inner(loader, self._collation, self._generator, chunk, prefetch)
        self._chunks: Iterator[Any] = iter(())
        self._rows: deque[ChunkRows] = deque()  # read and not handed out, oldest first
        self._spare: ChunkRows | None = None  # the stream's first sample
        self.stock = 0
        self.ended = True

    def begin(self, seed: int) -> None:
        """Start the stream anew, with workers seeded by ``seed``."""
        self.end()
        self._generator.manual_seed(seed)
        self._chunks, self._spare, self.ended = iter(self._inner), None, False

    def ensure(self, num_samples: int) -> None:
        """Read until ``num_samples`` are in stock or the stream ends."""
        while self.stock < num_samples and not self.ended:
            try:
                chunk = next(self._chunks)
            except StopIteration:
                self.ended = True
                return
            content, size = chunk if self._loader.num_workers else ([chunk], 1)
            self._rows.append(ChunkRows(content, 0, size))
            self.stock += size
            if self._spare is None:
                # Apart from what is handed out, as a `collate_fn` may change its samples.
                kept = copy.deepcopy(content) if isinstance(content, list) else content
                self._spare = ChunkRows(kept, 0, 1)

    def skip(self, num_samples: int) -> None:
        """Read past ``num_samples``.

        Raises:
            RuntimeError: the stream has fewer.
        """
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

    def take(self, num_samples: int, first: int, forwards: Sequence[int]) -> list[Any]:
        """Return the batches of some of the next ``num_samples``, which are then gone.

        Args:
            num_samples: how many to move on by, at most the stock.
            first: where among them the first batch begins.
            forwards: how many samples each batch gets, one after the other; one without any gets
                the first sample of the stream to stand in.
        """
        batches, begin = [], first
        for size in forwards:
            rows = list(self._slice(begin, begin + size)) if size else [self._stand_in()]
            batches.append(self._pin(self._collation.batch(rows)))
            begin += size
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
            sample = self._spare.chunk
            packed = pack(sample if isinstance(sample, list) else sample.unpack(copy=False))
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
        self._rows.clear()
        self.stock, self.ended = 0, True

    def close(self) -> None:
        """Stop persistent workers too."""
        self.end()
        self._inner._iterator = None

    def _stand_in(self) -> ChunkRows:
        spare = self._spare
        assert spare is not None, "a stream without a single sample is refused before"
        if isinstance(spare.chunk, list):
            return ChunkRows(copy.deepcopy(spare.chunk), 0, 1)
        return spare

    def _slice(self, first: int, last: int) -> Iterator[ChunkRows]:
        """Yield what holds the samples from ``first`` to ``last`` of the stock."""
        begin = 0
        for rows in self._rows:
            size = rows.last - rows.first
            low, high = max(first - begin, 0), min(last - begin, size)
            if low < high:
                yield ChunkRows(rows.chunk, rows.first + low, rows.first + high)
            begin += size
            if begin >= last:
                return

    def _drop(self, num_samples: int) -> None:
        self.stock -= num_samples
        while num_samples:
            rows = self._rows.popleft()
            size = rows.last - rows.first
            if size > num_samples:
                self._rows.appendleft(ChunkRows(rows.chunk, rows.first + num_samples, rows.last))
                return
            num_samples -= size


class _ShownDataset(IterableDataset[Any]):
    """The user's stream where `WorkerInit` looks for it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


class _PackChunk:
    """What a worker does with the samples it has read, and how many they were."""

    def __init__(self, merge: Callable[[list[Any]], Any] | None) -> None:
        self._merge = merge

    def __call__(self, samples: list[Any]) -> tuple[Packed, int]:
        return pack(self._merge(samples) if self._merge else samples), len(samples)


def _inner(
    loader: DataLoader[Any],
    collation: Collation,
    generator: torch.Generator,
    chunk: int,
    prefetch: int,
) -> DataLoader[Any]:
    """Return torch's own loader over the stream, set up as the user's, that gives samples."""
    if loader.num_workers == 0:
        return DataLoader(loader.dataset, batch_size=None, collate_fn=as_it_is, generator=generator)
    return inner_loader(
        loader,
        _ShownDataset(loader.dataset),
        batch_size=chunk,
        collate_fn=_PackChunk(collation.merge),
        worker_init_fn=WorkerInit(loader.worker_init_fn),
        generator=generator,
        prefetch_factor=prefetch,
        persistent_workers=loader.persistent_workers,
        timeout=loader.timeout,
    )
