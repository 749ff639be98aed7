"""The user's DataLoader, one global step an iteration, of which every rank gets its part."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from threading import Condition, RLock
from time import perf_counter
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ...._nested_tensors import input_size, tensors_in
from ...._planner import Plan, Work, batch_lengths
from ...._types import IntArray
from ...._warning import warn
from ....exceptions import invalid
from .._protocols import ANEW, MicroBatch, StepStart
from .._step import MicroBatches, Step, with_units
from ..deal._by_cost import CostDeal, Indices, SeenLengths
from ..deal._plans import EpochSteps, PlanBook, StepSpan
from ..fetch._loader_workers import with_parts
from ..fetch._sources import BatchSource, InlineSource, KeysOf, PrefetchSource, epoch_keys, seeded
from ..order._drawing import pass_epoch
from ..order._global_order import (
    EpochOrder,
    GlobalOrder,
    LoopStart,
    goes_on,
)
from ._base import AbstractStepLoader, StepContext, checked, sealed
from ._claimed import Claimed

_MOST_STARTS = 8  # more epochs than a loop fetches ahead


class BalancedLoader(AbstractStepLoader):
    r"""Hands out this rank's part of every global step, by the newest plan.

    Step $k$ of an epoch trains on positions $[kB, (k+1)B)$ of one order, or on batch $k$ of a
    ``batch_sampler``, under any plan. A plan only says which rank computes which of them. So every
    sample counts exactly once an epoch, and the samples of a step depend neither on the plans nor
    on the number of ranks. A step that has not $B$ samples is divided in proportion to the plan.

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

    _at: EpochOrder

    def __init__(
        self, loader: DataLoader[Any], context: StepContext, *, block_size: int | None = None
    ) -> None:
        super().__init__(loader, context, EpochOrder())
        self._size = context.global_batch_size
        ranks = context.ranks
        self._order = GlobalOrder(
            loader, ranks, ranks.share, global_batch_size=self._size, block_size=block_size
        )
        self._starts: deque[LoopStart] = deque(maxlen=_MOST_STARTS)

        self._lock = RLock()  # plans come from any thread
        self._by_cost: CostDeal | None = None
        self._seen: SeenLengths | None = None
        read = loader  # with a collator that reports lengths, where those are seen in time
        if context.cost is not None:
            self.costs = context.cost.table(loader.dataset)
            self._by_cost = CostDeal(self.costs, rank=ranks.rank, world_size=ranks.world_size)
            if loader.num_workers:
                self.num_steps_ahead = max(2, loader.num_workers * (loader.prefetch_factor or 1))
            if context.cost.from_batch is not None:
                self._seen = SeenLengths(self.costs, ranks)
                # In the training process, where samples and batch come together.
                own, of = loader.collate_fn, context.cost.from_batch
                read = with_parts(loader, collate_fn=partial(batch_lengths, of, collate=own))
        self._book = PlanBook(ranks.rank, self._size, by_cost=self._by_cost)
        has_cap = context.cost is not None and context.cost.max_size is not None
        self._fits_lengths = None if has_cap else False  # what batches have; None before the first
        self._problem: Exception | None = None
        self._source: BatchSource = (
            PrefetchSource(read, Condition(self._lock), ranks.check)
            if loader.num_workers
            else InlineSource(read)
        )
        self._num_skipped = 0
        self._keys_of: KeysOf | None = None  # of the newest loop's epoch
        context.session.subscribe(partial(_pass_on, weakref.WeakMethod(self._on_plan)))
        weakref.finalize(self, _close, self._source, os.getpid())

    @property
    def sampler(self) -> Any:
        """The user's sampler; its ``set_epoch`` counts on rank 0."""
        return self._order.sampler

    @property
    def num_samples(self) -> int:
        """Samples of an epoch that are trained on, over all ranks.

        Of a batch sampler other than torch's own, those of the newest epoch.
        """
        return (self._order.steps if self.is_fixed else self._at.steps).num_samples

    @property
    def is_fixed(self) -> bool:
        return self._order.batches is None

    @property
    def tail_batch_size(self) -> int | None:
        return self._order.steps.num_samples % self._size or None

    def __len__(self) -> int:
        if self._order.is_endless:
            raise TypeError(f"a loader over an endless {type(self.sampler).__name__} has no length")
        return len(self._order.steps if self.is_fixed else self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Pass ``epoch`` on to the sampler if it wants to know; others reshuffle by themselves."""
        pass_epoch(self.sampler, epoch)

    def skip(self, num_steps: int, *, epochs_begun: int | None = None) -> None:
        """Have the next iteration leave out the first steps of its epoch, on every rank.

        For drivers that count steps themselves; ``load_state_dict`` knows all of it. With a
        ``sample_seed``, what samples draw follows from the epochs that were begun before.

        Raises:
            ValueError: the epoch has no step after so many, or a state was loaded that says
                where to begin.
        """
        if self.is_fixed or num_steps < 0:
            _check_skipped(num_steps, self._order.steps)
        if self._resume is not None:
            raise _both_ways()
        self._num_skipped = num_steps
        self._at.number = self._at.number if epochs_begun is None else epochs_begun

    def equal_forwards(self) -> None:
        """Have all ranks make as many forwards from the next step on.

        For the middle of an epoch: at its begin, ``StepContext.equal_forwards`` decides. On every
        rank, between the same steps of a loop over ``steps()``.
        """
        with self._lock:
            self._book.equal_forwards = True
            if self._by_cost is not None:
                self._by_cost.begin(self._at.blocks.indices, equal_forwards=True)
            self._source.replan()

    def _state(self) -> dict[str, Any]:
        state = sealed(self._fields())
        return state if self._seen is None else {**state, "lengths": self._seen.written()}

    def _fields(self) -> dict[str, Any]:
        # Another thread may hand out, or begin an epoch, meanwhile.
        at, step, starts = self._at, self._context.session.steps.next_unused, tuple(self._starts)
        if step is None:
            step = starts[0].step if starts else self._context.count.value
        at, taken = goes_on(step, at, starts)
        position = at.steps.end(taken)
        fields = {
            "kind": "order" if self.is_fixed else "batches",
            "epochs_begun": at.number,
            "steps_taken": taken,
            "steps_of_run": step,
            "global_batch_size": self._size,
            "num_samples": self._order.num_samples if self.is_fixed else at.steps.num_samples,
        }
        if not self.is_fixed:
            fields |= {"num_steps": len(at.steps), "position": position}
        return fields | at.state(position)

    def _checked(self, state: object) -> dict[str, Any]:
        where = "BalancedLoader.load_state_dict(state=...)"
        good = checked(state, where, self._fields())
        num_samples, num_steps = self._order.num_samples, len(self._order.steps)
        found, size, taken = good["num_samples"], good["global_batch_size"], good["steps_taken"]
        if self.is_fixed and size != self._size:  # else the batches alone say what a step has
            raise invalid(
                where,
                f"be of the global batch size {self._size}",
                size,
                f"With another number of ranks, give `Balancer({size})` and the loader a "
                f"`batch_size` of that over the number of ranks, rounded up.",
            )
        if self.is_fixed and (found != num_samples or taken > num_steps):
            raise invalid(
                where,
                f"be of an epoch of {num_samples} samples in {num_steps} steps",
                f"one of {found} samples after step {taken}",
                "Give the loader the data set, sampler and `drop_last` of back then.",
            )
        if self._num_skipped:
            raise _both_ways()
        if self._seen is not None:
            assert isinstance(state, dict)
            good["lengths"] = self._seen.check(state.get("lengths", ""))
        return good

    def _begin_epoch(self) -> EpochOrder:
        resume, self._resume, at = self._resume, None, self._at
        if self._seen is not None:
            self._seen.restore(resume["lengths"] if resume is not None else "")
            self._seen.merge()
        if resume is not None:
            at = EpochOrder(number=resume["epochs_begun"], steps_taken=resume["steps_taken"])
            resume = resume if resume["order"] else None  # it was written before the first epoch
        num_steps, position = len(self._order.steps), self._order.steps.end(at.steps_taken)
        if resume is not None and not self.is_fixed:
            num_steps, position = resume["num_steps"], resume["position"]
        finished = at.steps_taken == num_steps
        # Opening draws from the sampler's generator: once an epoch, or once a run if workers
        # persist. After a finished epoch, the former is the next one's.
        late = resume is not None and finished and not self._loader.persistent_workers
        if not late:
            self._source.open()
        if resume is not None:
            again = self._order.redraw(
                resume["order"],
                position,
                fingerprint=resume["fingerprint"],
                num_fingerprinted=resume["num_fingerprinted"],
                finished=finished,
            )
            if not finished:
                again.number, again.steps_taken = at.number, at.steps_taken
                return again
        if late:
            self._source.open()
        skipped, self._num_skipped = self._num_skipped, 0
        order = self._order.draw()
        _check_skipped(skipped, order.steps)
        order.number, order.steps_taken = at.number + 1, skipped
        return order

    def _read_on(self) -> None:
        taken = self._at.steps_taken
        self._starts.append(LoopStart(self._next_step, self._at, taken))
        steps = self._at.steps
        if steps.ends is not None:
            self._context.check_sizes(np.diff(steps.ends, prepend=0), self._whole)
        if taken < len(steps):
            self._draw(taken)
        indices_of: Indices = self._at.blocks.indices
        self._book.whole, self._book.equal_forwards = self._whole, self._equal_forwards()
        if self._by_cost is not None:
            equal_forwards = self._book.equal_forwards
            self._by_cost.begin(indices_of, equal_forwards=equal_forwards, whole=self._whole)
        context, self._keys_of = self._context, None
        if context.sample_seed is not None:
            self._keys_of = epoch_keys(context.sample_seed, context.number, self._at.number)
            indices_of = seeded(indices_of, self._keys_of)
        # The book's, as the source must not keep the loader alive.
        self._source.begin(indices_of, self._spans(taken), self._book.share)

    def _return_to(self, at: EpochOrder) -> None:
        self._source.end()
        self._at = at
        self._source.open()

    def _end_reading(self) -> None:
        self._source.end()
        if not self._open:
            self._at.end()

    def _close_source(self) -> None:
        self._source.close()

    def _spans(self, taken: int) -> Iterator[StepSpan]:
        """Return the steps of the epoch after so many."""
        step = self._next_step + taken - self._at.steps_taken
        return self._at.steps.spans(step, taken)

    def _draw(self, taken: int) -> None:
        """Draw the order past the step after so many, and forget what is before it."""
        steps = self._at.steps
        self._at.advance(steps.end(taken), steps.end(taken + 2))

    def _next(self) -> Step | MicroBatch | None:
        at = self._at
        if (span := at.steps.span(self._next_step, at.steps_taken)) is None:
            return None
        step, first, num_samples = span
        plan = self._plan()
        parts, fetched, data_s = self._fetched(span, plan)
        work, units, keys_of, epoch = None, None, None, self._keys_of
        checksum = plan.epoch + 1  # no two plans of one epoch have other sizes
        if self._by_cost is not None:
            parts, work, checksum = self._assigned(span, parts)
            if self._fits_lengths is not False:
                self._check_cap(parts)
        if self._context.counter is not None:
            parts, units = with_units(parts, self._context.counter)
        if epoch is not None:
            keys_of = lambda slots: epoch(first + slots)  # noqa: E731
            pairs = zip(parts, map(keys_of, self._book.slots(span)), strict=True)
            parts = [replace(part, keys=own) for part, own in pairs]
        given: MicroBatches | MicroBatch
        if self._whole:
            (given,) = parts
        elif (opened := self._book.open_step(span)) is not None:
            given = Claimed(
                parts,
                step,
                opened,
                source=self._source,
                fetched=fetched,
                steps=self._context.session.steps,
                keys_of=keys_of,
            )
        else:
            given = MicroBatches(parts)
        self._at.steps_taken += 1
        equal = self._book.equal_forwards and self._book.has_equal_forwards(span)
        own = given.num_samples
        return self._hand_out(
            given, StepStart(step, own, num_samples, data_s, units, work, checksum, equal)
        )

    def _fetched(self, span: StepSpan, plan: Plan) -> tuple[list[MicroBatch], Any, float]:
        """Return what the source gives of a step, and the seconds that the wait took."""
        began_s = perf_counter()
        at, taken = self._at, self._at.steps_taken
        if at.drawn < at.steps.num_samples and at.steps.end(taken + 2) > at.drawn:
            self._draw(taken)
        if self._problem is not None or self._book.only is not plan:
            self._put_into_force(plan, span.step)
        parts, fetched = self._source.take(span)
        return parts, fetched, perf_counter() - began_s

    def _put_into_force(self, plan: Plan, step: int) -> None:
        with self._lock:
            if self._problem is not None:
                raise self._problem
            if self._book.apply(plan, step):
                self._source.replan()

    def _assigned(
        self, span: StepSpan, parts: list[MicroBatch]
    ) -> tuple[list[MicroBatch], Work, int]:
        """Return a step's batches by cost, with what ranks compare of it.

        Begin to assign the next that is fetched.
        """
        lengths: list[IntArray] | None = None
        if self._seen is not None:
            lengths = [part.batch[1] for part in parts]
            parts = [replace(part, batch=part.batch[0]) for part in parts]
        with self._lock:
            later = self._spans(self._at.steps_taken + 1 + self.num_steps_ahead)
            if (coming := next(later, None)) is not None:
                self._book.look_ahead(coming)
            if self._seen is not None and lengths is not None:
                indices = self._at.blocks.indices(span.first, span.num_samples)
                assert indices is not None, "a step that is handed out was drawn"
                for slots, seen in zip(self._book.slots(span), lengths, strict=True):
                    self._seen.record(indices[slots], seen)
            work, checksum, sizes = self._book.assigned(span, lengths)
        if sizes:
            parts = [replace(part, sizes=own) for part, own in zip(parts, sizes, strict=True)]
        return parts, work, checksum

    def _check_cap(self, parts: list[MicroBatch]) -> None:
        """Warn once of a forward over the cap: its samples are longer than ``prepare`` found them.

        It is noticed where batches so far had as many tokens as the lengths say.
        """
        assert self._context.cost is not None
        most = self._context.cost.max_size
        for part in parts:
            if not part.num_samples:
                continue
            _, found = input_size(tensors_in(part.batch))
            if most is not None and self._fits_lengths and part.size <= most < found:
                warn(
                    f"A forward has a size of {found} where `Cost(max_size={most})` is the cap: "
                    f"samples have become longer than `prepare` found them, which reads lengths "
                    f"once. When they change: {ANEW}"
                )
            self._fits_lengths = self._fits_lengths is not False and found == part.size

    def _on_plan(self, plan: Plan) -> None:
        with self._lock:
            try:
                if self._book.on_plan(plan, now=self._context.count.value):
                    self._source.replan()
            except Exception as error:  # raised at the next plan point, where it can be seen
                self._problem = error


def _check_skipped(num_steps: int, steps: EpochSteps) -> None:
    if not 0 <= num_steps < len(steps):
        raise invalid(
            "BalancedLoader.skip(num_steps=...)",
            f"be at least 0 and less than the epoch's {len(steps)} steps",
            num_steps,
            "Count the steps of one epoch only.",
        )


def _both_ways() -> ValueError:
    return invalid(
        "BalancedLoader",
        "get the start of its next epoch from one call",
        "`load_state_dict` and `skip` both",
        "Load the state alone: it has the step.",
    )


def _pass_on(listener: weakref.WeakMethod[Callable[[Plan], None]], plan: Plan) -> None:
    """Pass a plan on, and keep no loader alive for that."""
    if (alive := listener()) is not None:
        alive(plan)


def _close(source: BatchSource, process: int) -> None:
    """Close ``source`` where it was made: forked children collect their copy of a loader too."""
    if os.getpid() == process:
        source.close()
