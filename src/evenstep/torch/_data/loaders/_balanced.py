"""The user's DataLoader, one global step an iteration, of which every rank gets its part."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from threading import Condition, RLock
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from ...._planner import Plan, Work
from ...._types import IntArray
from ....exceptions import invalid
from .._loader_state import OrderedForm
from .._protocols import MicroBatch
from .._step import (
    KnownPortions,
    Portions,
    Step,
    out_of_turn,
    with_keys,
    with_sizes,
    with_units,
)
from ..deal._by_cost import CostDeal, SeenLengths
from ..deal._plans import PlanBook, StepSpan, spans_of
from ..deal._sample_keys import EpochKeys
from ..fetch._prefetch import source_of
from ..fetch._sources import BatchSource, Feed, FetchCounts, IndicesOf, seeded
from ..fetch._with_lengths import CapCheck, measuring, unpacked
from ..order._global_order import (
    EpochOrder,
    GlobalOrder,
    LoopStart,
    OrderedEpoch,
    checked_num_steps,
    goes_on,
)
from ..order._samplers import tell_epoch
from ._base import AbstractStepLoader, Loops, StepContext
from ._claimed import Claimed

_MOST_STARTS = 8  # more epochs than a loop fetches ahead


class BalancedLoader(AbstractStepLoader):
    r"""Hands out this rank's part of every global step, by the newest plan.

    Step $k$ of an epoch trains on positions $[kB, (k+1)B)$ of one order, under any plan. A plan
    only says which rank computes which of them. So every sample counts exactly once an epoch, and
    the samples of a step depend neither on the plans nor on the number of ranks.

    Your loader is kept: data set, sampler (on rank 0, for all ranks), ``collate_fn``, loader
    workers and their settings. Two things differ. The samples of a rank are in the order of their
    positions. And a ``collate_fn`` other than torch's runs in a thread of the training process,
    because only the plan says which samples share a batch. A slow one takes time from training, and
    random numbers in it are drawn in the training process.

    A plan point is where the loop comes back for the next step. The batch handed out there always
    has the size of the plan in force, also when workers fetch ahead.

    Iterating gives this rank's batch of every step; a rank without samples in a step gets one of
    them as a stand-in, of weight 0. ``steps`` gives steps that consist of micro-batches.

    Args:
        loader: the user's own. Given the same generators, one process sees the very batches that
            torch's loader gives.
        context: the run whose steps it hands out.
        block_size: indices of the order that are drawn at a time, the same on all ranks; None
            chooses a number.

    Raises:
        ValueError: the loader cannot be balanced; the message names the remedy.
    """

    _at: OrderedEpoch
    _ahead: Iterator[StepSpan]  # the steps of the newest loop

    def __init__(
        self, loader: DataLoader[Any], context: StepContext, *, block_size: int | None = None
    ) -> None:
        self._size = context.global_batch_size
        ranks = context.ranks
        self._order = GlobalOrder(
            loader, ranks, ranks.share, global_batch_size=self._size, block_size=block_size
        )
        self._num_steps = checked_num_steps(self._order.num_samples, self._size, loader.drop_last)
        self._form = OrderedForm(self._size, self._order.num_samples, self._num_steps)
        self._loader = loader
        self._context = context
        self._loops = Loops(context.session)
        self._at = OrderedEpoch(EpochOrder())
        self._starts: deque[LoopStart] = deque(maxlen=_MOST_STARTS)

        self._lock = RLock()  # plans come from any thread
        self._by_cost: CostDeal | None = None
        self._seen: SeenLengths | None = None
        self._cap_check: CapCheck | None = None
        read = loader  # with a collator that tells lengths, where those are seen in time
        if context.cost is not None:
            self.costs = context.cost.table(loader.dataset)
            self._by_cost = CostDeal(self.costs, rank=ranks.rank, world_size=ranks.world_size)
            if loader.num_workers:
                self.num_steps_ahead = max(2, loader.num_workers * (loader.prefetch_factor or 1))
            if context.cost.max_size is not None:
                self._cap_check = CapCheck(context.cost.max_size)
            if context.cost.from_batch is not None:
                self._seen = SeenLengths(self.costs, ranks)
                read = measuring(loader, context.cost.from_batch)
        self._book = PlanBook(ranks.rank, self._size, by_cost=self._by_cost)
        self._problem: Exception | None = None
        self._source = source_of(read, Condition(self._lock), ranks.check)
        self._num_skipped = 0
        self._keys: EpochKeys | None = None  # of the newest loop's epoch
        context.session.subscribe(partial(_pass_on, weakref.WeakMethod(self._on_plan)))
        weakref.finalize(self, _close, self._source, os.getpid())

    @property
    def sampler(self) -> Any:
        """The user's sampler; its ``set_epoch`` counts on rank 0."""
        return self._order.sampler

    @property
    def num_samples(self) -> int:
        """Samples of an epoch that are trained on, over all ranks."""
        return min(self._order.num_samples, self._num_steps * self._size)

    @property
    def tail_batch_size(self) -> int | None:
        return self.num_samples % self._size or None

    @property
    def fetch_counts(self) -> FetchCounts:
        """How many samples this rank asked for so far, and how many it used."""
        return self._source.counts

    def __len__(self) -> int:
        if self._order.is_endless:
            raise TypeError(f"a loader over an endless {type(self.sampler).__name__} has no length")
        return self._num_steps

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the sampler if it wants to know; others reshuffle by themselves."""
        tell_epoch(self.sampler, epoch)

    def skip(self, num_steps: int, *, epochs_begun: int | None = None) -> None:
        """Have the next iteration leave out the first steps of its epoch, on every rank.

        For drivers that count steps themselves; ``load_state_dict`` knows all of it. With a
        ``sample_seed``, what samples draw follows from the epochs that were begun before.

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
        self._at.number = self._at.number if epochs_begun is None else epochs_begun

    def equal_forwards(self) -> None:
        """Have all ranks make as many forwards from the next step on, where plans go by cost.

        In the middle of an epoch: at its begin, ``StepContext.equal_forwards`` tells. On every
        rank, between the same steps of a loop over ``steps()``.
        """
        if self._by_cost is not None:
            with self._lock:
                self._by_cost.begin(self._at.order.blocks.indices, equal_forwards=True)
                self._source.replan()

    def _state(self) -> dict[str, Any]:
        # Another thread may hand out, or begin an epoch, meanwhile.
        at, step, starts = self._at, self._context.session.steps.next_unused, tuple(self._starts)
        if step is None:
            step = starts[0].step if starts else self._context.count.value
        at, taken = goes_on(step, at, starts, num_steps=self._num_steps)
        state = self._form.write(
            at.order.state(taken * self._size),
            epochs_begun=at.number,
            steps_taken=taken,
            steps_of_run=step,
        )
        return state if self._seen is None else {**state, "lengths": self._seen.written()}

    def _checked(self, state: object) -> dict[str, Any]:
        good = self._form.read(state)
        if self._num_skipped:
            raise _both_ways()
        if self._seen is not None:
            assert isinstance(state, dict)
            good["lengths"] = self._seen.check(state.get("lengths", ""))
        return good

    def _begin_epoch(self) -> OrderedEpoch:
        resume, self._resume, at = self._resume, None, self._at
        if self._seen is not None:
            self._seen.restore(resume["lengths"] if resume is not None else "")
            self._seen.merge()
        if resume is not None:
            at = OrderedEpoch(EpochOrder(), resume["epochs_begun"], resume["steps_taken"])
            resume = resume if resume["order"] else None  # it was written before the first epoch
        finished = at.steps_taken == self._num_steps
        # Opening draws from the sampler's generator: once an epoch, or once a run if workers
        # persist. After a finished epoch, the former is the next one's.
        late = resume is not None and finished and not self._loader.persistent_workers
        if not late:
            self._source.open()
        if resume is not None:
            at.order = self._order.redraw(
                resume["order"],
                at.steps_taken * self._size,
                fingerprint=resume["fingerprint"],
                num_fingerprinted=resume["num_fingerprinted"],
                finished=finished,
            )
            if not finished:
                return at
        if late:
            self._source.open()
        skipped, self._num_skipped = self._num_skipped, 0
        return OrderedEpoch(self._order.draw(), at.number + 1, skipped)

    def _read_on(self, *, whole: bool) -> None:
        self._starts.append(LoopStart(self._loops.next_step, self._at, self._at.steps_taken))
        self._ahead = self._spans()
        if (span := next(self._spans(), None)) is not None:
            self._draw(span.first)
        indices_of: IndicesOf = self._at.order.blocks.indices
        if self._by_cost is not None:
            equal_forwards = self._equal_forwards(whole=whole)
            self._by_cost.begin(indices_of, equal_forwards=equal_forwards, whole=whole)
        # The book's, as the source must not keep the loader alive.
        share_of = partial(self._book.share, whole=whole)
        context, self._keys = self._context, None
        if context.sample_seed is not None:
            self._keys = EpochKeys.of_epoch(context.sample_seed, context.number, self._at.number)
            indices_of = seeded(indices_of, self._keys)
        self._source.begin(indices_of, self._spans(), share_of)

    def _return_to(self, at: OrderedEpoch) -> None:
        self._source.end()
        self._at = at
        self._source.open()

    def _end_reading(self) -> None:
        self._source.end()
        if not self._loops.is_nested:
            self._at.order.end()

    def _close_source(self) -> None:
        self._source.close()

    def _spans(self) -> Iterator[StepSpan]:
        """Return the steps of the epoch from here on."""
        first = self._at.steps_taken * self._size
        return spans_of(self._loops.next_step, first, self.num_samples, self._size)

    def _draw(self, first: int) -> None:
        """Draw the order past the step that begins at a position, and forget what is before it."""
        self._at.order.advance(first, first + 2 * self._size)

    def _next(self, *, whole: bool) -> Step | MicroBatch | None:
        if (span := next(self._ahead, None)) is None:
            return None
        count = self._context.count
        if span.step != count.value:
            raise out_of_turn()
        count.begun = True
        plan = self._loops.steps.at(span.step)
        began_s = perf_counter()
        if span.first + 2 * self._size > self._at.order.drawn:
            self._draw(span.first)
        if self._problem is not None or self._book.only is not plan:
            self._put_into_force(plan, span.step)
        parts, feed = self._source.take(span)
        return self._given(span, plan, parts, feed, data_s=perf_counter() - began_s, whole=whole)

    def _given(
        self,
        span: StepSpan,
        plan: Plan,
        parts: list[MicroBatch],
        feed: Feed,
        *,
        data_s: float,
        whole: bool,
    ) -> Step | MicroBatch:
        """Return what the loop gets of batches that are here."""
        work, units, keys_of = None, None, None
        checksum = plan.epoch + 1  # no two plans of one epoch have other sizes
        if self._by_cost is not None:
            parts, (work, checksum) = self._assigned(span, parts, whole=whole)
        if self._cap_check is not None:
            self._cap_check.look(parts)
        if self._context.counter is not None:
            parts, units = with_units(parts, self._context.counter)
        if (keys := self._keys) is not None:
            keys_of = lambda slots: keys.at(span.first + slots)  # noqa: E731
            parts = with_keys(parts, list(map(keys_of, self._book.fetched(span, whole=whole))))
        given: Portions | MicroBatch
        if whole:
            (given,) = parts
        elif (opened := self._book.open_step(span)) is not None:
            steps = self._loops.steps
            given = Claimed(parts, span.step, opened, feed=feed, steps=steps, keys_of=keys_of)
        else:
            given = KnownPortions(parts)
        self._at.steps_taken += 1
        return self._hand_out(
            given, span.num_samples, data_s=data_s, units=units, work=work, checksum=checksum
        )

    def _put_into_force(self, plan: Plan, step: int) -> None:
        with self._lock:
            if self._problem is not None:
                raise self._problem
            if self._book.apply(plan, step):
                self._source.replan()

    def _assigned(
        self, span: StepSpan, parts: list[MicroBatch], *, whole: bool
    ) -> tuple[list[MicroBatch], tuple[Work | None, int]]:
        """Return a step's batches by cost, with what ranks compare of it.

        Begin to assign the next that is fetched.
        """
        lengths: list[IntArray] | None = None
        if self._seen is not None:
            parts, lengths = unpacked(parts)
        with self._lock:
            end = span.first + span.num_samples
            after = spans_of(span.step + 1, end, self.num_samples, self._size)
            later = islice(after, self.num_steps_ahead, None)
            if (coming := next(later, None)) is not None:
                self._book.look_ahead(coming)
            if self._seen is not None and lengths is not None:
                indices = self._at.order.blocks.indices(span.first, span.num_samples)
                assert indices is not None, "a step that is handed out was drawn"
                for slots, seen in zip(self._book.slots(span, whole=whole), lengths, strict=False):
                    self._seen.record(indices[slots], seen)
            found = self._book.assigned(span, whole=whole, lengths=lengths)
        return with_sizes(parts, found.sizes), (found.work, found.checksum)

    def _on_plan(self, plan: Plan) -> None:
        with self._lock:
            try:
                if self._book.on_plan(plan, now=self._context.count.value):
                    self._source.replan()
            except Exception as error:  # raised at the next plan point, where it can be seen
                self._problem = error


def _both_ways() -> ValueError:
    return invalid(
        "BalancedLoader",
        "get the start of its next epoch from one call",
        "`load_state_dict` and `skip` both",
        "Load the state alone: it has the step.",
    )


def _pass_on(listener: weakref.WeakMethod[Callable[[Plan], None]], plan: Plan) -> None:
    """Tell of a plan, and keep no loader alive for that."""
    if (alive := listener()) is not None:
        alive(plan)


def _close(source: BatchSource, process: int) -> None:
    """Close ``source`` where it was made: forked children collect their copy of a loader too."""
    if os.getpid() == process:
        source.close()
