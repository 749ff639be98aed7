"""What a gradient is multiplied by, and what each reduction of gradients was made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..._exchange._exchange import Exchange
from ..._exchange._mailbox import UnitSum
from ..._exchange._message_kinds import Reduced
from ..._run._step_state import StepState
from ._batch_checks import UnevenParts
from ._marks import Recorder
from ._output_looks import Look
from ._tickets import Match, Ticket, Weight, known


@dataclass(eq=False, slots=True)
class ForwardRecord:
    """A forward that may have a backward.

    Attributes:
        match: to which batch it belongs.
        ticket: of that batch, or the one most likely: where there are several, they weigh alike.
        weight: what the gradient at its output is multiplied by.
        model: number of the model.
        reduces: whether its backward reduces gradients; None where that is not known.
        compares: whether ranks compare the scale of its gradient.
        looks: at the gradients that its backward began with.
        other_rows: how many of its rows may be of no batch.
        trains: whether the backward under way is for parameters; None where it always is, as no
            input needs a gradient.
    """

    match: Match
    ticket: Ticket
    weight: Weight
    model: int
    reduces: bool | None
    compares: bool
    looks: list[Look] = field(default_factory=list)
    other_rows: int = 0
    trains: Callable[[], bool] | None = None

    def share(self) -> float | None:
        """Return which part of its batch it had, if that can be compared between ranks.

        Micro-batches and stand-ins are parts of their own: only whole batches are counted.
        """
        counts = self.ticket.num_samples > 0 and self.ticket.step.num_forwards == 1
        return self.match.share if counts else None


class Weights:
    r"""Weighs batches so that the plain mean over ranks is the mean over the global batch.

    $n W / N$ for the $n$ samples of a batch, of $N$ in the step over $W$ ranks; $u W / U$ where the
    loss is a mean over other units. A sum is left as it is.

    Args:
        exchange: sums units over ranks, and says which steps other ranks know.
        recorder: leaves out the wait for other ranks' units.
        world_size: number of workers.
        loss_reduction: ``"mean"`` or ``"sum"``, what the user's loss does over samples.
    """

    def __init__(
        self, exchange: Exchange, recorder: Recorder, world_size: int, loss_reduction: str
    ) -> None:
        self._exchange = exchange
        self._recorder = recorder
        self._world_size = world_size
        self._sums = loss_reduction == "sum"

    def of(self, step: StepState, num_samples: int, units: float | None) -> tuple[Weight, Any]:
        """Return the weight of a batch of ``step``, and what is equal where batches weigh alike."""
        if step.unit_sum is not None:
            assert units is not None, "every batch of a step that counts units counts its own"
            return partial(self._by_units, step.unit_sum, units), (step, units)
        if self._sums:
            weight = 1.0 if num_samples else 0.0
        else:
            weight = num_samples * self._world_size / step.global_num_samples
        return weight, weight

    def by_others(self, use: ForwardRecord, books: ReductionLedger) -> float:
        """Return the weight of a forward of which other ranks know the step.

        Of two batches with as many samples here, but of steps with different numbers of samples,
        some other rank has different numbers. Called in the backward.

        Args:
            use: the forward, which has the batch from then on.
            books: of the model's reductions.
        """
        steps = self._exchange.divergence.steps_of((use.model, books.next_number(use.model)))
        found = tuple(one for one in use.match.tickets if one.step.number in steps)
        if len({one.key for one in found}) == 1:
            use.match = Match(found, found[0].weight, is_certain=len(found) == 1)
            use.weight = found[0].weight
            return known(use.weight)
        return known(use.match.weight)  # which raises

    def _by_units(self, unit_sum: UnitSum, units: float) -> float:
        """Return the weight of a forward with ``units``, when all ranks have sent theirs.

        Called in the backward. A step without a single unit has nothing to learn from: weight 0.
        """
        if unit_sum.total is None:  # others are late: that is no time of this rank's own
            begin = self._recorder.clock.mark()
            self._exchange.units.wait(unit_sum)
            self._recorder.exclude(begin, self._recorder.clock.mark())
        total = unit_sum.total
        return units * self._world_size / total if total else 0.0


class ReductionLedger:
    """The forwards of each model since its last reduction that have had a backward."""

    def __init__(self) -> None:
        self._open: defaultdict[int, list[ForwardRecord]] = defaultdict(list)
        self._numbers: defaultdict[int, int] = defaultdict(int)
        self._uneven = UnevenParts()

    def next_number(self, model: int) -> int:
        """Return the number of the model's next reduction."""
        return self._numbers[model]

    def add(self, uses: Iterable[ForwardRecord]) -> list[Reduced]:
        """Take note of a backward through ``uses``; return what was reduced at its end."""
        reducing: list[int] = []
        for use in uses:
            use.ticket.other_rows += use.other_rows
            if use.reduces is None:
                continue
            self._open[use.model].append(use)
            if use.reduces:
                if use.model not in reducing:
                    reducing.append(use.model)
                use.reduces = None  # DDP reduces in the first backward after a forward
        found = []
        for model in reducing:
            parts, number = self._open.pop(model), self._numbers[model]
            self._numbers[model] += 1
            if len(parts) == 1 and len(parts[0].match.tickets) == 1:  # as nearly always
                only = parts[0].ticket.step
                shares = {only.number: parts[0].share()}
                found.append(Reduced(model, number, shares, (), only.checksum))
            else:
                found.append(self._reduced(model, number, parts))
        return found

    def _reduced(self, model: int, number: int, uses: Sequence[ForwardRecord]) -> Reduced:
        shares: dict[int, float | None] = {}
        maybe: set[int] = set()
        for use in uses:
            steps = {ticket.step.number for ticket in use.match.tickets}
            if len(steps) > 1:
                maybe |= steps
                continue
            step, share = steps.pop(), use.share()
            before = shares.get(step, 0.0)
            shares[step] = None if before is None or share is None else before + share
        if not self._uneven.said:
            self._uneven.look(uses)
        checksum = 0
        if not maybe:
            for one in {use.ticket.step for use in uses}:
                checksum ^= one.checksum
        return Reduced(model, number, shares, tuple(sorted(maybe)), checksum)
