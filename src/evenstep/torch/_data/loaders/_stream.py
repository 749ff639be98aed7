"""A stream as the training loop meets it: one global step an iteration, without an index."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ....exceptions import EvenstepWarning, invalid
from ....planner import Plan
from .._loader_state import StreamForm, StreamPosition
from .._protocols import LoaderRanks, LoaderSession, MicroBatch
from .._step import Attempts, KnownPortions, Step, StepCount, with_units
from ..deal._stream_terms import StreamKind, StreamStock, terms_of
from ..fetch._stream_reader import StreamReader
from ..fetch._torch_loader import pinner_of
from ..order._samplers import check_iterates
from ._loops import HandingOut, batches_of

_LARGEST = 1 << 63


class StreamLoader:
    r"""Hands out this rank's part of every global step of a stream, as the newest plan cuts it.

    A stream has no index and perhaps no end, so what can be promised depends on who reads what:

    - ``"same"``: every rank reads all samples in the same order and keeps those at its positions.
      Step $k$ trains on positions $[kB, (k+1)B)$ whatever the plan, the last step on what is
      left, on any number of ranks: as with data that is read by index. An epoch is the stream
      once. The price is that every rank reads everything: right where reading costs little
      beside training.
    - ``"sharded"``: every rank reads samples of its own, the usual practice. The plan says how
      many it takes next. An epoch is every shard once: one that ran dry gives none any more (its
      rank runs a stand-in of weight 0 beside the others), the epoch ends when all are dry, and
      every sample counts once. Which samples share a step depends on the plans then, and so does
      the number of steps. Where a shard ends, steps have fewer than $B$ samples;
      ``drop_last=True`` ends the epoch there instead, for all, and leaves the rest unread.

    The weight of a step is by what ranks really delivered: they tell one another what they have
    in stock one step ahead, so no rank waits for that, unless a plan gives a rank more than twice
    what it had. Loader workers read ahead, and shards among them are the stream's own affair
    (``get_worker_info``), as in torch's loader; their chunks come in turn, as its batches do.

    Args:
        loader: the user's own, over an ``IterableDataset``.
        kind: who reads what.
        ranks: that train on it.
        session: gives plans, and is told how a step goes.
        global_batch_size: samples of a step over all ranks.
        no_sync: entered around all but the last micro-batch of a step; may be set later.
        count: steps of the run so far, shared by loaders which are used in turn.
        counter: counts the units in a batch that is handed out; None where they are samples.

    Raises:
        ValueError: the loader cannot be balanced; the message names the remedy.
    """

    tail_batch_size = None
    """How many samples the last step has is not known before the end."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        kind: StreamKind,
        ranks: LoaderRanks,
        session: LoaderSession,
        global_batch_size: int,
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        count: StepCount | None = None,
        counter: Callable[[Any], float] | None = None,
    ) -> None:
        _check(loader)
        self._loader = loader
        self._ranks = ranks
        self._global_batch_size = global_batch_size
        self._terms = terms_of(kind, global_batch_size)
        self._reader = _reader(loader, kind, ranks.world_size, global_batch_size)
        self._session = session
        self._count = StepCount() if count is None else count
        self._handing_out = HandingOut(session, self._count)
        self._counter = counter
        self.no_sync = no_sync
        self.attempts: Attempts | None = None

        num_readers = max(loader.num_workers, 1)
        self._form = StreamForm(kind, global_batch_size, num_readers, ranks.world_size)
        self._at = StreamPosition(passed=[0] * ranks.world_size)
        self._next_step = 0
        self._stocks: Callable[[], list[list[int]]] | None = None
        self._resume: dict[str, Any] | None = None

    @property
    def dataset(self) -> Any:
        """The user's stream."""
        return self._loader.dataset

    def __getattr__(self, name: str) -> Any:
        """Return what the user's loader has under ``name``, such as ``collate_fn``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Return the global steps of an epoch, where the stream knows its length.

        Raises:
            TypeError: it does not, or is sharded: then the number depends on the plans.
        """
        if self._terms.kind != "same":
            raise TypeError(
                "the steps of an epoch over a sharded stream depend on the plans, so it has no "
                "length. Count steps instead, and leave the loop after as many as you want."
            )
        full, rest = divmod(len(self.dataset), self._global_batch_size)
        return full + (rest > 0 and not self._loader.drop_last)

    def __iter__(self) -> Iterator[Any]:
        return batches_of(self._steps(whole=True))

    def steps(self) -> Iterator[Step]:
        """Return an iterator over the epoch's steps, each to be iterated for its micro-batches."""
        return self._steps(whole=False)

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the stream if it wants to know."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: what was handed out, not what was read ahead.

        The same on every rank, and of plain values. Of a stream that all read alike it is free of
        the number of ranks; of shards it holds how far each is.
        """
        if self._resume is not None:
            return {**self._resume}
        return self._form.write(self._at, self._count.value)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on from ``state``, on every rank.

        It reads past what was trained on: the stream has to give the same samples again.

        Raises:
            ValueError: ``state`` is damaged, or of a loader with another global batch, number of
                readers or, for shards, of ranks.
        """
        good = self._form.read(state)
        if self._loader.persistent_workers and good["epochs_begun"] > 1 and not good["finished"]:
            warnings.warn(
                "`persistent_workers=True`: what a stream draws from its workers' generators after "
                "the first epoch cannot be drawn again. If its order is drawn there, resume "
                "without persistent workers.",
                EvenstepWarning,
                stacklevel=2,
            )
        self._count.go_on_from(good["steps_of_run"])
        self._resume = good

    def repeated(self, size: int) -> Any:
        """Return a batch of the stream's first sample, ``size`` times; during a loop only."""
        return self._reader.repeated(size)

    def close(self) -> None:
        """Stop workers, and end an iteration under way; iterating starts them anew."""
        self._handing_out.cut_off()
        self._stocks = None
        self._reader.close()

    def _steps(self, *, whole: bool) -> Generator[Step, None, None]:
        with self._handing_out.loop(self._reader.end, cuts=not whole) as loop:
            self._begin_epoch()
            while (step := self._next(whole=whole)) is not None:
                yield step
                self._handing_out.check(loop)

    def _begin_epoch(self) -> None:
        """Open the stream, at its begin or where the checkpoint stands, and look at its start."""
        resume, self._resume = self._resume, None
        if resume is not None:
            self._at = self._form.position(resume)
        if self._at.seed is None:
            self._at.seed = self._draw_seed()
        if resume is None or self._at.finished or not self._at.epochs_begun:
            self._at.epochs_begun += 1
            self._at.steps_taken, self._at.finished = 0, False
            self._at.passed = [0] * self._ranks.world_size
        self._next_step = self._count.value
        seed = self._at.seed + 1_000_003 * self._at.epochs_begun + self._lane()
        self._reader.begin(seed % _LARGEST)
        self._reader.ensure(1)
        self._look(self._agree(self._reader.mark()))
        self._reader.skip(self._at.passed[self._ranks.rank])
        self._announce(-(-self._global_batch_size // self._ranks.world_size))

    def _look(self, stocks: list[StreamStock]) -> None:
        """Raise or warn if the begin of the streams shows a mistake."""
        if (problem := self._terms.problem(stocks)) is not None:
            raise RuntimeError(problem)
        doubt = self._terms.doubt(stocks) if self._handing_out.current == 1 else None
        if doubt is not None:
            warnings.warn(doubt, EvenstepWarning, stacklevel=5)

    def _lane(self) -> int:
        """Return what sets this rank's seeds apart from others': nothing, where all read alike."""
        return 0 if self._terms.kind == "same" else self._ranks.rank

    def _draw_seed(self) -> int:
        source = self._loader.generator or torch.default_generator
        seed = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=source)
        return self._ranks.share_indices([int(seed)] if self._ranks.rank == 0 else None)[0]

    def _next(self, *, whole: bool) -> Step | None:
        """Return the next step, or None at the end of the epoch."""
        assert self._stocks is not None
        self._count.check_turn(self._next_step)
        stocks = _read(self._stocks())
        if (problem := self._terms.problem(stocks)) is not None:
            raise RuntimeError(problem)
        sizes: tuple[int, ...] = ()
        if any(stock.num_samples for stock in stocks):
            self._count.begun = True
            plan = self._session.steps.at(self._count.value)
            if self._terms.lacks(stocks, plan.batch_size):
                self._reader.ensure(plan.batch_size[self._ranks.rank])
                stocks = self._agree()
            sizes = self._terms.sizes(stocks, plan.batch_size)
        total = sum(sizes)
        if not total or (self._loader.drop_last and total < self._global_batch_size):
            self._at.finished = True
            return None
        return self._take(sizes, plan, whole=whole)

    def _take(self, sizes: tuple[int, ...], plan: Plan, *, whole: bool) -> Step:
        began_s = perf_counter()
        rank, mine = self._ranks.rank, sizes[self._ranks.rank]
        portion = self._terms.portion(sizes, rank)
        forwards = (mine,) if whole else plan.forwards(rank, mine)
        batches = self._reader.take(portion.num_passed, portion.first, forwards)
        parts = [MicroBatch(*pair) for pair in zip(batches, forwards, strict=True)]
        self._announce(plan.batch_size[rank])
        data_s = perf_counter() - began_s
        parts, units = with_units(parts, self._counter)
        self._at.steps_taken += 1
        self._next_step = self._count.value + 1
        passed = self._terms.passed(sizes)
        self._at.passed = [old + new for old, new in zip(self._at.passed, passed, strict=True)]
        return self._handing_out.next_step(
            KnownPortions(parts),
            sum(sizes),
            data_s=data_s,
            units=units,
            no_sync=self.no_sync,
            attempts=self.attempts,
        )

    def _announce(self, batch_size: int) -> None:
        """Read ahead, and tell the others what is in stock for the next step."""
        self._reader.ensure(self._terms.ahead(batch_size))
        self._stocks = self._ranks.gather(self._stock())

    def _agree(self, mark: int = 0) -> list[StreamStock]:
        """Tell the others what is in stock, and wait for what they have."""
        return _read(self._ranks.gather(self._stock(mark))())

    def _stock(self, mark: int = 0) -> list[int]:
        return [self._reader.stock, int(self._reader.ended), mark, self._form.num_readers]


def _read(rows: list[list[int]]) -> list[StreamStock]:
    return [StreamStock(stock, bool(ended), mark, readers) for stock, ended, mark, readers in rows]


def _reader(
    loader: DataLoader[Any], kind: StreamKind, world_size: int, global_batch_size: int
) -> StreamReader:
    """Return what reads: in chunks that depend on the global batch and not on who reads them."""
    fair = -(-global_batch_size // world_size)
    prefetch = loader.prefetch_factor or 2
    pin = pinner_of(loader)
    if kind == "sharded":
        return StreamReader(loader, chunk=fair, prefetch=prefetch, pin=pin)
    # A chunk holds what all ranks take together: as many samples ahead, in fewer chunks.
    ahead = max(-(-prefetch // world_size), 1)
    return StreamReader(loader, chunk=global_batch_size, prefetch=ahead, pin=pin)


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
