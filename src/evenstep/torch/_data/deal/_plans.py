"""Which samples of a step, or of an evaluation, are this rank's: replayed from the plans."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ...._planner import Plan, PlanCosts, SampleCosts, fitted
from ...._types import IntArray
from ....claims._step_claims import Claim
from ....exceptions import invalid
from ....solve import WorkerCosts, partition
from ....solve._allocate import cut, in_proportion, scaled
from ....solve._deal import Deal
from ._by_cost import Assigned, CostDeal


def spread(sizes: IntArray) -> IntArray:
    """Return the owner of every position, each rank's spread evenly over all of them.

    Data sets are often sorted, by length say: contiguous shares would differ in cost.
    """
    owners = np.repeat(np.arange(len(sizes)), sizes)
    places = np.concatenate([np.arange(size) for size in sizes.tolist()])
    # A rank's j-th of n belongs at (2j + 1) / 2n of the way; in integers, as ranks have to agree.
    way = ((2 * places + 1) << 32) // (2 * sizes[owners])
    ranks: IntArray = owners[np.argsort(way, kind="stable")]
    return ranks


def forwards(
    rank: int, num_samples: int, weights: Sequence[int], *, batch_size: int, lockstep: bool
) -> list[IntArray]:
    """Return the places in the order of what ``rank`` evaluates, forward by forward.

    Ranks share by speed. In lockstep every rank makes as many forwards as any other, of sizes as
    equal as can be, and none of a sample where it has too few.
    """
    if not num_samples:
        return []
    sizes = in_proportion(num_samples, weights)
    mine = np.flatnonzero(spread(sizes) == rank)
    if lockstep:
        return np.array_split(mine, -(-int(sizes.max()) // batch_size))
    return [mine[k : k + batch_size] for k in range(0, len(mine), batch_size)]


def forwards_of_steps(
    rank: int, num_samples: int, weights: Sequence[int], *, step_size: int
) -> list[IntArray]:
    """Return what ``rank`` evaluates, one forward for every ``step_size`` samples of the order.

    Ranks share the samples of each step by speed. Every rank has at least one of each: a last step
    that has fewer samples than there are ranks is added to the one before.

    Args:
        rank: whose.
        num_samples: of the evaluation, none or at least one for each rank.
        weights: of the ranks, by which they share.
        step_size: samples of a step over all ranks, at least one for each.
    """
    ends = [*range(step_size, num_samples, step_size), num_samples]
    if len(ends) > 1 and num_samples - ends[-2] < len(weights):
        del ends[-2]
    found = []
    for first, end in zip([0, *ends], ends, strict=False):
        sizes = in_proportion(end - first, weights)
        while sizes.min() < 1 < sizes.max():
            sizes[sizes.argmax()] -= 1
            sizes[sizes.argmin()] += 1
        found.append(np.flatnonzero(spread(sizes) == rank) + first)
    return found if num_samples else []


def forwards_by_cost(
    rank: int,
    indices: IntArray,
    costs: SampleCosts,
    known: PlanCosts | None,
    *,
    world_size: int,
    batch_size: int,
    lockstep: bool,
) -> list[IntArray]:
    """Return what ``rank`` evaluates, forward by forward, where samples are shared out by cost.

    Args:
        rank: whose.
        indices: of all samples, in order.
        costs: of the data set.
        known: what samples cost each rank, as training has shown; None is equal ranks.
        world_size: number of ranks.
        batch_size: most samples of a forward.
        lockstep: whether every rank makes as many forwards as any other.
    """
    if not len(indices):
        return []
    features = costs.features(indices)
    none = np.zeros(world_size, np.int64)  # no step begins here
    slope = np.tile(costs.start(), (world_size, 1)) if known is None else known.workers().slope
    found = partition(
        features,
        fitted(WorkerCosts(slope, none), features),
        padded=bool(costs.cost.padded),
        forwards=costs.forwards(features, most=batch_size, equal=lockstep, empty=lockstep),
    )
    return list(found.samples(rank))


_LOGGER = logging.getLogger("evenstep")


class StepSpan(NamedTuple):
    """Where a step lies in the run and in its epoch's order.

    Attributes:
        step: optimizer step, counted over the run, from 0.
        first: its first position in the order.
        num_samples: how many positions it has over all ranks.
    """

    step: int
    first: int
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class EpochSteps:
    """Where the steps of an epoch end in its order.

    Attributes:
        num_samples: that are trained on, over all ranks.
        size: samples of each step but a short last one, where ``ends`` does not say more.
        ends: positions at which steps end, ``(len(self),)``; None where all have one size.
    """

    num_samples: int = 0
    size: int = 1
    ends: IntArray | None = None

    def __len__(self) -> int:
        """Return how many steps there are."""
        return -(-self.num_samples // self.size) if self.ends is None else len(self.ends)

    def end(self, num_steps: int) -> int:
        """Return how many samples the first so many steps have; of more, all."""
        if self.ends is None:
            return min(num_steps * self.size, self.num_samples)
        return int(self.ends[min(num_steps, len(self.ends)) - 1]) if num_steps else 0

    def span(self, step: int, taken: int) -> StepSpan | None:
        """Return the step after the first ``taken``, which is ``step`` of the run; None if none."""
        if self.ends is None:  # without the method: it is called in every step
            first = taken * self.size
            num_samples = min(self.size, self.num_samples - first)
            return StepSpan(step, first, num_samples) if num_samples > 0 else None
        if taken >= len(self.ends):
            return None
        first = int(self.ends[taken - 1]) if taken else 0
        return StepSpan(step, first, int(self.ends[taken]) - first)

    def spans(self, step: int, taken: int) -> Iterator[StepSpan]:
        """Yield that step and all after it."""
        while (span := self.span(step, taken)) is not None:
            yield span
            step, taken = step + 1, taken + 1


class Share:
    """This rank's part of one step under one plan.

    Attributes:
        slots: its samples, counted from the first of the step; ascending, or by cost ascending
            within each forward.
        forwards: how many of them each of its forwards gets, one after the other. Fewer than
            there are slots where the others are up for claims.
        fetched: the slots to fetch: its own or, if it has none, the step's first to stand in.
        begun: those of them that the forwards begin with.
        places: where among those each forward's are; one without any has the stand-in.
    """

    def __init__(self, slots: IntArray, forwards: tuple[int, ...]) -> None:
        self.slots, self.forwards = slots, forwards
        self.fetched = slots if len(slots) else np.zeros(1, np.int64)
        ends = list(accumulate(forwards))
        self.begun = self.fetched[: (ends[-1] if ends else 0) or len(forwards)]
        self.places = [
            slice(end - size, end - size + max(size, 1))
            for size, end in zip(forwards, ends, strict=True)
        ]

    def of_forwards(self) -> list[IntArray]:
        """Return the slots that each of the forwards gets."""
        return [self.begun[place] for place in self.places]

    def equals(self, other: Share) -> bool:
        """Return whether it is the same samples in the same forwards."""
        return self.forwards == other.forwards and (
            self.slots is other.slots or np.array_equal(self.slots, other.slots)
        )


class DealtPlan:
    """A plan, and who owns which slot of a full step under it.

    Attributes:
        rank: this process.
        plan: comes into force with its first step.
        deal: who owns which slot.
        share: all that this rank owns, for one forward.
        most_forwards: of any rank in a full step.
        tile: samples that keep together.
        num_begun: samples of the first forwards where others are up for claims: all but one, or all
            but as many as keep together.
        kept: the slots that are this rank's unasked, but for a later forward.
    """

    def __init__(self, rank: int, plan: Plan, deal: Deal) -> None:
        self.rank, self.plan, self.deal = rank, plan, deal
        self.share = _in_one_forward(deal.slots(rank))
        self.most_forwards = plan.most_forwards(plan.batch_size)
        self.tile = plan.tile or 1
        first = plan.first[rank] if plan.first is not None else 0
        self.num_begun = max(first - self.tile, 0)
        self.kept = self.share.slots[self.num_begun : first]

    def claimed(self, claim: Claim) -> IntArray:
        """Return the slots of a claim."""
        return self.deal.slots(claim.owner)[claim.start : claim.stop]

    def forwards(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of ``num_samples`` claimed ones each forward gets.

        Never more than the plan or an equal split would have put through one: a claim may be
        larger than anything whose memory is known.
        """
        plan = self.plan
        limit = max(plan.batch_size[self.rank], -(-len(self.deal.owner) // len(plan.batch_size)))
        if plan.max_forward is not None:
            limit = min(limit, plan.max_forward[self.rank])
        return cut(num_samples, limit, self.tile)


class PlanBook:
    """The plans from the one in force on, each with its deal.

    Every rank learns every plan and moves the same deal along, hence they agree who owns a slot
    without a word. The first plan is the one in force when the first step was asked for, the same
    on all ranks; those that came before wait until then.

    One thread at a time may add plans; any may ask for a share meanwhile.

    Args:
        rank: this process.
        global_batch_size: samples of a full step.
        by_cost: assigns samples under plans that have costs; None where no plan has.

    Attributes:
        only: the plan that is in force, if no later one is known.
        whole: whether a rank takes its part of a step in one forward, however large it is.
        equal_forwards: whether all ranks make as many forwards, where they are known beforehand.
    """

    def __init__(
        self, rank: int, global_batch_size: int, *, by_cost: CostDeal | None = None
    ) -> None:
        self._rank = rank
        self._by_cost = by_cost
        self._global_batch_size = global_batch_size
        # Replaced and never changed, so that reading it needs no lock.
        self._entries: tuple[DealtPlan, ...] = ()
        self.only: Plan | None = None
        self.whole, self.equal_forwards = True, False
        self._early: list[Plan] = []
        self._has_warned = False

    def on_plan(self, plan: Plan, *, now: int = 0) -> bool:
        """Take in a plan for the steps ahead; return whether it was new and put to use.

        Args:
            plan: comes after the newest one.
            now: the earliest step of the run that can still be asked for. What cannot be in force
                then is forgotten: a loader may wait for long while others train.

        Raises:
            RuntimeError: the plan before it is missing.
            ValueError: its sizes do not add up to the global batch.
        """
        if not self._entries:
            self._early.append(plan)
            while len(self._early) > 1 and self._early[1].first_step <= now:
                del self._early[0]
            return False
        newest = self._entries[-1]
        if plan.epoch <= newest.plan.epoch:
            return False
        if plan.epoch > newest.plan.epoch + 1:
            raise RuntimeError(
                f"plan {plan.epoch} came after plan {newest.plan.epoch}: one is missing"
            )
        self._append(plan, newest.deal.move(self._sizes(plan)))
        self._forget(now)
        return True

    def apply(self, plan: Plan, step: int) -> bool:
        """Put into force what the plan point of ``step`` says, and forget what came before.

        Return whether it was new, so that shares may have changed.
        """
        if self._entries:
            is_new = self.on_plan(plan)
        else:
            is_new = True
            self._append(plan, Deal.fresh(self._sizes(plan)))
            for later in self._early:
                self.on_plan(later)
            self._early.clear()
        self._forget(step)
        return is_new

    def _forget(self, now: int) -> None:
        while len(self._entries) > 1 and self._entries[1].plan.first_step <= now:
            self._put(self._entries[1:])

    def share(self, span: StepSpan) -> Share | None:
        """Return this rank's part of a step; None while no plan is in force.

        By cost, None as well while the order of the step is not drawn.
        """
        if not (entries := self._entries):
            return None
        entry = entries[0] if len(entries) == 1 else self._in_force(span)
        if entry.plan.costs is not None:
            return self._share_by_cost(entry.plan, span)
        is_full = span.num_samples == self._global_batch_size
        share = entry.share if is_full else self._part(entry.plan, span.num_samples)
        if self.whole:
            return share
        num_samples, fewest = len(share.slots), 1
        if self.open_step(span) is not None:
            num_samples = min(num_samples, entry.num_begun)
            if len(share.slots) and not num_samples:
                return Share(share.slots, ())
        elif self.equal_forwards:
            fewest = entry.most_forwards
            if not is_full:
                sizes = self._sizes_of(entry.plan, span.num_samples)
                fewest = entry.plan.most_forwards(sizes)
        return Share(share.slots, entry.plan.forwards(self._rank, num_samples, fewest=fewest))

    def _share_by_cost(self, plan: Plan, span: StepSpan) -> Share | None:
        assert self._by_cost is not None
        parts = self._by_cost.parts(plan, span.first, span.num_samples)
        if parts is None:
            return None
        slots = np.concatenate(parts)
        if self.whole:  # in the order of the step
            return _in_one_forward(np.sort(slots))
        return Share(slots, tuple(map(len, parts)))

    def has_equal_forwards(self, span: StepSpan) -> bool:
        """Return whether all ranks make as many forwards in a step, and know it.

        Where they are to, ``equal_forwards``.
        """
        plan = self._in_force(span).plan
        if plan.costs is None:
            return self.open_step(span) is None
        assert self._by_cost is not None
        return self._by_cost.has_equal_forwards(plan, span.first, span.num_samples)

    def look_ahead(self, span: StepSpan) -> None:
        """Begin to assign a step that is asked for later."""
        if self._by_cost is not None and self._entries:
            self._by_cost.look_ahead(self._in_force(span).plan, span.first, span.num_samples)

    def slots(self, span: StepSpan) -> list[IntArray]:
        """Return the slots that each of this rank's forwards begins with, stand-ins included."""
        share = self.share(span)
        assert share is not None
        return share.of_forwards()

    def assigned(self, span: StepSpan, lengths: Sequence[IntArray] | None) -> Assigned:
        """Return what ranks compare of a step by cost, and what this one computes of it.

        Args:
            span: the step.
            lengths: of its samples, forward by forward, where they are seen in time.
        """
        assert self._by_cost is not None
        plan = self._in_force(span).plan
        sizes = self._sizes_of(plan, span.num_samples)
        share = self.share(span)
        assert share is not None
        parts = share.of_forwards() if len(share.slots) else []
        return self._by_cost.assigned(plan, parts, span.first, span.num_samples, sizes, lengths)

    def open_step(self, span: StepSpan) -> DealtPlan | None:
        """Return what the claims of a step go by; None where no samples are up for claims.

        In a step of another size than the global batch none are. With a device that runs ahead, a
        later plan comes while the step is under way; what this returned stays.
        """
        entry = self._in_force(span)
        is_full = span.num_samples == self._global_batch_size
        return entry if is_full and entry.plan.first is not None else None

    def _in_force(self, span: StepSpan) -> DealtPlan:
        """Return what is in force in a step; the first if none has begun."""
        entries = self._entries
        for entry in reversed(entries):
            if entry.plan.first_step <= span.step:
                return entry
        return entries[0]

    def _append(self, plan: Plan, deal: Deal) -> None:
        self._put((*self._entries, DealtPlan(self._rank, plan, deal)))

    def _put(self, entries: tuple[DealtPlan, ...]) -> None:
        self._entries, self.only = entries, entries[0].plan if len(entries) == 1 else None

    def _sizes(self, plan: Plan) -> IntArray:
        if sum(plan.batch_size) != self._global_batch_size:
            raise invalid(
                "Plan(batch_size=...)",
                f"add up to the global batch of {self._global_batch_size}",
                plan.batch_size,
                "Plan all of its samples, and no more.",
            )
        return np.array(plan.batch_size, np.int64)

    def _part(self, plan: Plan, num_samples: int) -> Share:
        """Return what this rank has of a step of another size than the global batch."""
        sizes = self._sizes_of(plan, num_samples)
        first = sum(sizes[: self._rank])
        return _in_one_forward(np.arange(first, first + sizes[self._rank], dtype=np.int64))

    def _sizes_of(self, plan: Plan, num_samples: int) -> tuple[int, ...]:
        """Return how many samples of a step each rank has by count."""
        for sizes in (plan.batch_size, plan.tail or ()):
            if sum(sizes) == num_samples:
                return sizes
        most = plan.max_forward if self.whole and plan.costs is None else None
        if most is not None and sum(most) < num_samples and not self._has_warned:
            self._has_warned = True
            text = (
                "A batch has %d samples, and %d are known to fit into one forward of each rank. %s"
            )
            remedy = "A loop over `loader.steps()` takes a rank's part in several forwards."
            _LOGGER.warning(text, num_samples, sum(most), remedy)
        return tuple(scaled(num_samples, plan.batch_size, most).tolist())


def _in_one_forward(slots: IntArray) -> Share:
    return Share(slots, (len(slots),))
