"""The user's DataLoader, one global step an iteration, of which every rank gets its part."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Condition, RLock
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from ....exceptions import invalid
from ....planner import Plan
from .._loader_state import OrderedForm
from .._protocols import LoaderRanks, LoaderSession
from .._step import Attempts, KnownPortions, Portions, Step, StepCount, with_units
from ..deal._plans import PlanBook, StepSpan, spans_of
from ..fetch._prefetch import source_of
from ..fetch._sources import BatchSource, FetchCounts
from ..order._global_order import GlobalOrder, OrderPlace, checked_num_steps
from ._claimed import Claimed
from ._loops import HandingOut, batches_of


class BalancedLoader:
    r"""Hands out this rank's part of every global step, as the newest plan cuts it.

    Step $k$ of an epoch trains on positions $[kB, (k+1)B)$ of one order, whatever the plan says;
    the plan says only which rank computes which of them. So every sample counts exactly once an
    epoch, and what is trained on does not depend on the plans, nor on the number of ranks.

    The user's loader is kept: data set, sampler (on rank 0, for all), ``collate_fn``, workers and
    what sets them up. Two things differ. The samples of a rank are in the order of their
    positions. And a ``collate_fn`` other than torch's runs in a thread of the training process,
    because which samples share a batch is known only with the plan: a slow one takes time from
    training, and one that draws random numbers draws them there.

    A plan point is where the loop comes back for the next step. The batch handed out there always
    has the size of the plan in force, also when workers fetch ahead.

    Iterating gives this rank's batch of every step; a rank without samples in a step gets one of
    them as a stand-in, of weight 0. ``steps`` gives steps that consist of micro-batches.

    Args:
        loader: the user's own. Given the same generators, one process sees the very batches that
            torch's loader gives.
        ranks: that train on it.
        session: gives plans, and is told how a step goes.
        global_batch_size: samples of a step over all ranks.
        no_sync: entered around all but the last micro-batch of a step; may be set later.
        count: steps of the run so far, shared by loaders which are used in turn.
        counter: counts the units in a batch that is handed out; None where they are samples.
        block_size: indices of the order that are drawn at a time, the same on all ranks; None is
            as many as suit.

    Attributes:
        no_sync: as given.
        attempts: what ``Step.backward`` runs by; set once the models are known.

    Raises:
        ValueError: the loader cannot be balanced; the message names the remedy.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        ranks: LoaderRanks,
        session: LoaderSession,
        global_batch_size: int,
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        count: StepCount | None = None,
        counter: Callable[[Any], float] | None = None,
        block_size: int | None = None,
    ) -> None:
        self._order = GlobalOrder(
            loader,
            rank=ranks.rank,
            world_size=ranks.world_size,
            share=ranks.share,
            global_batch_size=global_batch_size,
            block_size=block_size,
        )
        self._num_steps = checked_num_steps(
            self._order.num_samples, global_batch_size, loader.drop_last
        )
        self._loader = loader
        self._global_batch_size = global_batch_size
        self._session = session
        self._count = StepCount() if count is None else count
        self._handing_out = HandingOut(session, self._count)
        self._counter = counter
        self.no_sync = no_sync
        self.attempts: Attempts | None = None

        self._lock = RLock()  # plans come from any thread
        self._book = PlanBook(ranks.rank, global_batch_size)
        self._problem: Exception | None = None
        self._source = source_of(loader, Condition(self._lock))
        self._num_begun = 0
        self._num_taken = 0
        self._resume: dict[str, Any] | None = None
        self._num_skipped = 0
        session.subscribe(_weak_listener(weakref.ref(self)))
        weakref.finalize(self, _close, self._source, os.getpid())

    @property
    def dataset(self) -> Any:
        """The user's data set."""
        return self._loader.dataset

    @property
    def sampler(self) -> Any:
        """The user's sampler; its ``set_epoch`` counts on rank 0."""
        return self._order.sampler

    @property
    def num_samples(self) -> int:
        """Samples of an epoch that are trained on, over all ranks."""
        return min(self._order.num_samples, self._num_steps * self._global_batch_size)

    @property
    def tail_batch_size(self) -> int | None:
        """Samples of the short last step over all ranks; None if every step is full."""
        return self.num_samples % self._global_batch_size or None

    @property
    def fetch_counts(self) -> FetchCounts:
        """How many samples this rank asked for so far, and how many it used."""
        return self._source.counts

    def __getattr__(self, name: str) -> Any:
        """Return what the user's loader has under ``name``, such as ``collate_fn``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Return the global steps of an epoch.

        Raises:
            TypeError: the sampler goes on for ever.
        """
        if self._order.is_endless:
            raise TypeError(f"a loader over an endless {type(self.sampler).__name__} has no length")
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        return batches_of(self._steps(whole=True))

    def steps(self) -> Iterator[Step]:
        """Return an iterator over the epoch's steps, each to be iterated for its micro-batches."""
        return self._steps(whole=False)

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the sampler if it wants to know; others reshuffle by themselves."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: what was handed out, less what the loop fetched ahead.

        A loop that fetches batches before it uses those at hand begins with the unused ones again.
        The same on every rank, of plain values, and free of the number of ranks. At any time: from
        inside a loop, after it, and before the first, where it is what was loaded, if anything.
        """
        if self._resume is not None:
            return {**self._resume}
        ahead = min(self._session.steps.num_ahead, self._num_taken)
        taken = self._num_taken - ahead
        return self._form().write(
            self._order.state(taken * self._global_batch_size),
            epochs_begun=self._num_begun,
            steps_taken=taken,
            steps_of_run=self._count.value - ahead,
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on from ``state``, on every rank.

        A loop under way is left as it is; the one after it begins where ``state`` says.

        Raises:
            ValueError: ``state`` is damaged, foreign, or of another global batch or data set.
        """
        good = self._form().read(state)
        if self._num_skipped:
            raise _both_ways()
        self._count.go_on_from(good["steps_of_run"])
        self._resume = good

    def skip(self, num_steps: int) -> None:
        """Have the next iteration leave out the first steps of its epoch, on every rank.

        For drivers that count steps themselves and draw the epoch's order by its number; where
        ``state_dict`` was kept, ``load_state_dict`` knows both.

        Raises:
            ValueError: the epoch has no step after so many, or a state was loaded that says
                where to begin.
        """
        if not 0 <= num_steps < self._num_steps:
            raise invalid(
                "BalancedLoader.skip(num_steps=...)",
                f"be at least 0 and less than the epoch's {self._num_steps} steps",
                num_steps,
                "Count the steps of one epoch only.",
            )
        if self._resume is not None:
            raise _both_ways()
        self._num_skipped = num_steps

    def close(self) -> None:
        """Stop workers and threads, and end an iteration under way; iterating starts them anew."""
        self._handing_out.cut_off()
        self._source.close()

    def _steps(self, *, whole: bool) -> Generator[Step, None, None]:
        outer = self._place() if self._handing_out.is_nested else None
        with self._handing_out.loop(self._end_epoch, cuts=not whole) as loop:
            try:
                self._begin_epoch()
                spans = self._begin_steps(whole=whole)
                while (span := next(spans, None)) is not None:
                    step, place = self._take(span, whole=whole), self._place()
                    yield step
                    del step  # its batch is the loop's alone
                    if self._handing_out.takes_over(loop):
                        self._return_to(place)
                        spans = self._begin_steps(whole=whole)
            finally:
                if outer is not None and self._handing_out.current == loop:
                    self._return_to(outer)

    def _begin_steps(self, *, whole: bool) -> Iterator[StepSpan]:
        """Have the steps from here on fetched, and return them."""
        self._advance(next(self._spans(), None))
        # The book's, as the source must not keep the loader alive.
        share_of = partial(self._book.share, whole=whole)
        self._source.begin(self._order.blocks.indices, self._spans(), share_of)
        return self._spans()

    def _place(self) -> tuple[OrderPlace, int, int]:
        return self._order.place(), self._num_begun, self._num_taken

    def _return_to(self, place: tuple[OrderPlace, int, int]) -> None:
        """Go on where a loop was left for another one."""
        self._source.end()
        order, self._num_begun, self._num_taken = place
        self._order.return_to(order)
        self._source.open()

    def _form(self) -> OrderedForm:
        return OrderedForm(self._global_batch_size, self._order.num_samples, self._num_steps)

    def _begin_epoch(self) -> None:
        """Start what fetches, begin an order or the checkpoint's again, and set the position."""
        resume, self._resume = self._resume, None
        if resume is not None:
            self._num_begun, self._num_taken = resume["epochs_begun"], resume["steps_taken"]
            resume = resume if resume["order"] else None  # it was written before the first epoch
        finished = self._num_taken == self._num_steps
        # Opening draws from the sampler's generator: once an epoch, or once a run if workers
        # persist. After a finished epoch, the former is the next one's.
        late = resume is not None and finished and not self._loader.persistent_workers
        if not late:
            self._source.open()
        if resume is not None:
            self._order.redraw(
                resume["order"],
                self._num_taken * self._global_batch_size,
                fingerprint=resume["fingerprint"],
                num_fingerprinted=resume["num_fingerprinted"],
                finished=finished,
            )
            if not finished:
                return
        if late:
            self._source.open()
        self._num_begun += 1
        self._num_taken, self._num_skipped = self._num_skipped, 0
        self._order.draw()

    def _end_epoch(self) -> None:
        """Let go of what the loop reads from."""
        self._source.end()
        self._order.end()

    def _spans(self) -> Iterator[StepSpan]:
        """Return the steps of the epoch from here on."""
        size, taken = self._global_batch_size, self._num_taken
        return spans_of(self._count.value, taken * size, self.num_samples, size)

    def _advance(self, span: StepSpan | None) -> None:
        """Draw the order past a step, and forget what is before it."""
        if span is not None:
            self._order.advance(span.first, span.first + 2 * self._global_batch_size)

    def _take(self, span: StepSpan, *, whole: bool) -> Step:
        self._count.check_turn(span.step)
        self._count.begun = True
        plan = self._session.steps.at(span.step)
        began_s = perf_counter()
        self._advance(span)
        with self._lock:
            if self._problem is not None:
                raise self._problem
            if self._book.apply(plan, span.step):
                self._source.replan()
        (parts, feed), data_s = self._source.take(span), perf_counter() - began_s
        parts, units = with_units(parts, self._counter)
        portions: Portions = KnownPortions(parts)
        if not whole and (opened := self._book.open_step(span)) is not None:
            portions = Claimed(parts, span, opened, feed=feed, session=self._session)
        self._num_taken += 1
        return self._handing_out.next_step(
            portions,
            span.num_samples,
            data_s=data_s,
            units=units,
            no_sync=self.no_sync,
            attempts=self.attempts,
        )

    def _on_plan(self, plan: Plan) -> None:
        with self._lock:
            try:
                if self._book.on_plan(plan, now=self._count.value):
                    self._source.replan()
            except Exception as error:  # raised at the next plan point, where it can be seen
                self._problem = error


def _both_ways() -> ValueError:
    return invalid(
        "BalancedLoader",
        "be told in one way where its next epoch begins",
        "`load_state_dict` and `skip` both",
        "Load the state alone: it knows the step.",
    )


def _weak_listener(loader: weakref.ref[BalancedLoader]) -> Callable[[Plan], None]:
    """Return a listener that keeps no loader alive."""

    def on_plan(plan: Plan) -> None:
        if (alive := loader()) is not None:
            alive._on_plan(plan)

    return on_plan


def _close(source: BatchSource, process: int) -> None:
    """Close ``source`` where it was made: forked children collect their copy of a loader too."""
    if os.getpid() == process:
        source.close()
