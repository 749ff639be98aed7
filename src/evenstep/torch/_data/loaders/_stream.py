"""A stream as the training loop meets it: one global step an iteration, without an index."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, final
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ...._planner import UNKNOWN, Plan, SampleCosts, Work, sample_length
from ...._types import IntArray
from ...._warning import warn
from ....exceptions import invalid
from .._protocols import MicroBatch, StepStart
from .._step import MicroBatches, Step, with_units
from ..deal._by_cost import CostDeal
from ..deal._stream_deal import OwnShards, SameStream, StreamKind, StreamStock, check_cost
from ..fetch._chunks import (
    Chunk,
    ChunkRows,
    Packed,
    SamplePlace,
    batch_of,
    chunk_merge,
    pack,
    rows_of,
)
from ..fetch._loader_workers import InWorkers, inner_loader, pinning
from ..order._drawing import check_iterates, pass_epoch
from ._base import AbstractStepLoader, StepContext, checked, sealed


def _no_length(sample: Any) -> int:
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
        length_of: returns the length of a sample, where the samples are read.

    Attributes:
        ended: whether there are no more than those in stock.
    """

    def __init__(
        self, loader: DataLoader[Any], length_of: Callable[[Any], int], *, chunk: int, prefetch: int
    ) -> None:
        self._loader = loader
        merge = chunk_merge(loader.collate_fn)
        self._collate = partial(batch_of, loader.collate_fn, merge)
        self._batch_of = pinning(loader, self._collate)
        self._generator = torch.Generator()
        self._length_of = length_of
        dataset, settings = loader.dataset, {}
        if loader.num_workers:
            dataset = InWorkers(dataset, partial(iter, dataset))
            settings = {
                "batch_size": chunk,
                "collate_fn": partial(_packed, merge, length_of),
                "prefetch_factor": prefetch,
                "persistent_workers": loader.persistent_workers,
                "timeout": loader.timeout,
            }
        self._inner = inner_loader(loader, dataset, self._generator, **settings)
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
        return self._collate([self._stand_in() for _ in range(size)])

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
        return copy.deepcopy(spare) if isinstance(spare, list) else spare, slice(0, 1)

    def _drop(self, num_samples: int) -> None:
        for _ in range(num_samples):
            self._places.popleft()
            self._lengths.popleft()


def _packed(
    merge: Callable[[list[Any]], Any] | None, length_of: Callable[[Any], int], samples: list[Any]
) -> tuple[Packed, list[int]]:
    """Return what a worker makes of the samples it has read, and their lengths."""
    lengths = [length_of(sample) for sample in samples]
    return pack(merge(samples) if merge else samples), lengths


_LARGEST = 1 << 63


@dataclass(slots=True)
class StreamPosition:
    """What was handed out so far, the same on every rank.

    Attributes:
        passed: samples of the epoch by which each rank's stream has moved on.
        seed: what workers are seeded by, with the epoch; None before the first.
        epochs_begun: how many.
        steps_taken: steps of the epoch.
        finished: whether the epoch is over.
    """

    passed: list[int]
    seed: int | None = None
    epochs_begun: int = 0
    steps_taken: int = 0
    finished: bool = False


class StreamLoader(AbstractStepLoader):
    r"""Hands out this rank's part of every global step of a stream, as the newest plan cuts it.

    A stream has no index and perhaps no end, so the promises depend on which rank reads what:

    - ``"same"``: every rank reads all samples in the same order and keeps those at its positions.
      Step $k$ trains on positions $[kB, (k+1)B)$ under any plan, the last step on what is left,
      on any number of ranks, as with data that is read by index. An epoch is the stream once.
      Every rank reads everything, so this is right if reading is cheap compared with training.
    - ``"sharded"``: every rank reads its own samples, the usual practice. The plan says how many it
      takes next. An epoch is every shard once, and every sample counts once. A rank with an empty
      shard runs a stand-in of weight 0, and the epoch ends when all shards are empty. The plans
      decide which samples share a step, and the number of steps. After a shard ends, steps have
      fewer than $B$ samples; ``drop_last=True`` ends the epoch there for all ranks instead, and
      leaves the rest unread.

    The weight of a step counts the delivered samples. Ranks report their stock one step ahead, so
    no rank waits for it, unless a plan gives a rank more than twice its former size. Loader workers
    read ahead. The stream splits itself between them (``get_worker_info``), as in torch's loader,
    and their chunks come in turn, as its batches do.

    By cost, with ``"same"`` alone, a step has the same samples. All ranks have read them before it
    begins, and find the same assignment by their lengths.

    Args:
        loader: the user's own, over an ``IterableDataset``.
        context: whose steps it hands out.
        kind: who reads what.

    Raises:
        ValueError: the loader cannot be balanced; the message names the remedy.
    """

    _at: StreamPosition

    def __init__(self, loader: DataLoader[Any], context: StepContext, *, kind: StreamKind) -> None:
        _check(loader)
        super().__init__(loader, context, StreamPosition([0] * context.ranks.world_size))
        self._kind, self._ranks, self._size = kind, context.ranks, context.global_batch_size
        # Where all read alike, a state is free of the ranks. A stream's order depends on readers.
        self._num_written = 1 if kind == "same" else self._ranks.world_size
        self._num_readers = max(loader.num_workers, 1)
        self._terms = (SameStream if kind == "same" else OwnShards)(self._size)
        cost = context.cost
        # Chunks depend on the global batch, and not on who reads them. Where all read alike, one
        # holds what all ranks take together: as many samples ahead, in fewer chunks.
        together = self._ranks.world_size if kind == "same" else 1
        self._reader = StreamReader(
            loader,
            _no_length if cost is None else partial(sample_length, cost.of),
            chunk=-(-self._size * together // self._ranks.world_size),
            prefetch=max(-(-(loader.prefetch_factor or 2) // together), 1),
        )
        self._by_cost: CostDeal | None = None
        if cost is not None:
            check_cost(cost)
            rank, world_size = self._ranks.rank, self._ranks.world_size
            self._lengths = SampleCosts(cost, np.full(2 * self._size, UNKNOWN, np.int64))
            self._by_cost = CostDeal(self._lengths, rank=rank, world_size=world_size)
            self.costs = self._lengths
        self._stocks: Callable[[], list[StreamStock]] | None = None

    def __len__(self) -> int:
        if self._kind != "same":
            raise TypeError(
                "the steps of an epoch over a sharded stream depend on the plans, so it has no "
                "length. Count steps instead, and leave the loop after as many as you want."
            )
        full, rest = divmod(len(self.dataset), self._size)
        return full + (rest > 0 and not self._loader.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the stream if it wants to know."""
        pass_epoch(self.dataset, epoch)

    def repeated(self, size: int) -> Any:
        """Return a batch of the stream's first sample, ``size`` times; during a loop only."""
        return self._reader.repeated(size)

    def _state(self) -> dict[str, Any]:
        return sealed(self._fields())

    def _fields(self) -> dict[str, Any]:
        at = self._at
        return asdict(at) | {
            "kind": f"stream, {self._kind}",
            "steps_of_run": self._context.count.value,
            "global_batch_size": self._size,
            "num_readers": self._num_readers,
            "passed": at.passed[: self._num_written],
            "seed": at.seed or 0,
        }

    def _checked(self, state: object) -> dict[str, Any]:
        where = "StreamLoader.load_state_dict(state=...)"
        good = checked(state, where, self._fields())
        for key, is_now, remedy in (
            ("global_batch_size", self._size, "Give it to the balancer as back then."),
            ("num_readers", self._num_readers, "Set `DataLoader(num_workers=...)` as back then."),
        ):
            if good[key] != is_now:
                raise invalid(where, f"have {key}={is_now}, as this loader has", good[key], remedy)
        if len(good["passed"]) != self._num_written:
            raise invalid(
                where,
                f"be of {self._num_written} ranks, as shards belong to ranks",
                len(good["passed"]),
                "Resume on as many ranks, or have all read the `stream='same'`.",
            )
        if self._loader.persistent_workers and good["epochs_begun"] > 1 and not good["finished"]:
            warn(
                "`persistent_workers=True`: what a stream draws from its workers' generators after "
                "the first epoch cannot be drawn again. If its order is drawn there, resume "
                "without persistent workers."
            )
        return good

    def _begin_epoch(self) -> StreamPosition:
        """Open the stream, at its begin or where the checkpoint stands, and look at its start."""
        resume, self._resume, at = self._resume, None, self._at
        if resume is not None:
            at = StreamPosition(
                passed=resume["passed"] * (self._ranks.world_size // self._num_written),
                seed=resume["seed"] if resume["epochs_begun"] else None,
                epochs_begun=resume["epochs_begun"],
                steps_taken=resume["steps_taken"],
                finished=resume["finished"],
            )
        at.seed = seed = self._draw_seed() if at.seed is None else at.seed
        if resume is None or at.finished or not at.epochs_begun:
            at = StreamPosition([0] * len(at.passed), seed, at.epochs_begun + 1)
        seed += 1_000_003 * at.epochs_begun
        if self._kind == "sharded":
            seed += self._ranks.rank  # where all read alike, seeds are alike
        self._reader.begin(seed % _LARGEST)
        self._reader.ensure(1)
        stocks = self._swap_stocks(self._reader.mark())()
        if (problem := self._terms.problem(stocks)) is not None:
            raise RuntimeError(problem)
        if self._current == 1 and (doubt := self._terms.doubt(stocks)) is not None:
            warn(doubt)
        return at

    def _draw_seed(self) -> int:
        source = self._loader.generator or torch.default_generator
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=source)
        number = np.array([int(seed)]) if self._ranks.rank == 0 else None
        return int(self._ranks.share((self._current, 0), number)[0])

    def _read_on(self) -> None:
        if self._by_cost is not None:
            self._by_cost.begin(self._places, equal_forwards=self._equal_forwards())
        self._reader.skip(self._at.passed[self._ranks.rank])
        self._read_ahead(-(-self._size // self._ranks.world_size))

    def _return_to(self, at: StreamPosition) -> None:
        raise RuntimeError(
            "the loader was closed or iterated anew, so this iteration cannot go on: what was "
            "read of a stream is gone. Make another loader for a look at its samples."
        )

    def _end_reading(self) -> None:
        self._reader.end()

    def _close_source(self) -> None:
        self._stocks = None
        self._reader.close()

    def _next(self) -> Step | MicroBatch | None:
        assert self._stocks is not None
        stocks = self._stocks()
        if (problem := self._terms.problem(stocks)) is not None:
            raise RuntimeError(problem)
        sizes: tuple[int, ...] = ()
        if any(stock.num_samples for stock in stocks):
            plan = self._plan()
            if self._terms.lacks(stocks, plan.batch_size):
                self._reader.ensure(plan.batch_size[self._ranks.rank])
                stocks = self._swap_stocks()()
            sizes = self._terms.sizes(stocks, plan.batch_size)
        total = sum(sizes)
        if not total or (self._loader.drop_last and total < self._size):
            self._at.finished = True
            return None
        return self._take(sizes, plan)

    def _take(self, sizes: tuple[int, ...], plan: Plan) -> Step | MicroBatch:
        began_s = perf_counter()
        rank, passed = self._ranks.rank, self._terms.passed(sizes)
        forwards, work, checksum = self._forwards(sizes, plan)
        batches = self._reader.take(passed[rank], forwards)
        self._read_ahead(plan.batch_size[rank])
        data_s = perf_counter() - began_s
        parts, units = with_units(
            [MicroBatch(*pair) for pair in zip(batches, map(len, forwards), strict=True)],
            self._context.counter,
        )
        self._at.steps_taken += 1
        self._at.passed = [old + new for old, new in zip(self._at.passed, passed, strict=True)]
        given = parts[0] if self._whole else MicroBatches(parts)
        step, num_samples = self._next_step, sum(sizes)
        own, equal = given.num_samples, self._has_equal_forwards()
        return self._hand_out(
            given, StepStart(step, own, num_samples, data_s, units, work, checksum, equal)
        )

    def _has_equal_forwards(self) -> bool:
        """Return whether all ranks make as many forwards, and know it: by cost they do not."""
        return self._by_cost is None and self._equal_forwards()

    def _forwards(
        self, sizes: tuple[int, ...], plan: Plan
    ) -> tuple[list[IntArray], Work | None, int]:
        """Return which samples each of this rank's forwards has, and what ranks compare of that."""
        rank, total = self._ranks.rank, sum(sizes)
        first = self._at.passed[rank]
        if self._by_cost is not None:
            self._learn_lengths(first, self._reader.lengths(total))
        if self._by_cost is None or plan.costs is None:
            fewest = plan.most_forwards(sizes) if self._has_equal_forwards() else 1
            counts = (
                (sizes[rank],) if self._whole else plan.forwards(rank, sizes[rank], fewest=fewest)
            )
            begin = self._terms.first(sizes, rank)
            own = np.arange(begin, begin + sizes[rank])
            parts = np.split(own, np.cumsum(counts)[:-1])
        else:
            found = self._by_cost.parts(plan, first, total)
            assert found is not None, "lengths are known as soon as samples are read"
            parts = [np.sort(np.concatenate(found))] if self._whole else list(found)
        if self._by_cost is None:
            return parts, None, 0
        some = [slots for slots in parts if len(slots)]
        counted = sizes if total == self._size else None
        work, checksum, _ = self._by_cost.assigned(plan, some, first, total, counted)
        return parts, work, checksum

    def _learn_lengths(self, first: int, lengths: IntArray) -> None:
        """Take in the lengths of all samples of a step, from position ``first`` of the stream on.

        Raises:
            ValueError: a sample is larger than a forward may be.
        """
        most = self._lengths.cost.max_size
        if most is not None and lengths.max() > most:
            raise invalid(
                "Cost(max_size=...)",
                "be at least the size of every sample",
                f"{most} where sample {first + int(lengths.argmax())} of the stream has "
                f"{lengths.max()}",
                "Cut the sample, leave it out, or raise the cap.",
            )
        self._lengths.correct(self._places(first, len(lengths)), lengths)

    def _places(self, first: int, num_samples: int) -> IntArray:
        """Return where the lengths of so many samples are kept: those of the newest steps are."""
        return np.arange(first, first + num_samples) % len(self._lengths.lengths)

    def _read_ahead(self, batch_size: int) -> None:
        """Read for the next step, and report to the others what is in stock for it."""
        self._reader.ensure(self._terms.ahead(batch_size))
        self._stocks = self._swap_stocks()

    def _swap_stocks(self, mark: int = 0) -> Callable[[], list[StreamStock]]:
        """Report to the others what is in stock, and return what waits for what they have."""
        reader = self._reader
        lengths = 0 if self._by_cost is None else crc32(reader.lengths(self._size).tobytes())
        rows = self._ranks.gather(
            [reader.stock, int(reader.ended), mark, self._num_readers, lengths]
        )
        return lambda: [StreamStock(*row) for row in rows()]


def _check(loader: DataLoader[Any]) -> None:
    """Raise unless ``loader`` reads single samples of a stream, as torch's does."""
    where = "Balancer.prepare(loader, stream=...)"
    if not isinstance(loader.dataset, IterableDataset):
        raise invalid(
            where,
            "be left out with data that is read by index",
            type(loader.dataset).__name__,
            "Steps are cut from the sampler's order then: leave `stream` out.",
        )
    if loader.batch_size is None:
        raise invalid(
            where,
            "leave it to evenstep which samples make a batch",
            "batch_size=None",
            "Let the stream yield single samples, and use `DataLoader(batch_size=...)`.",
        )
    check_iterates(loader, where)
