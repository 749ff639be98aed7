"""What a gradient is multiplied by, what it shows of the loss, what each reduction is made of."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch

from ..._exchange._exchange import Exchange
from ..._exchange._mailbox import UnitSum
from ..._exchange._message_kinds import Reduced, ScalesReport
from ..._planner import Plan
from ..._run._step_state import StepState
from ..._warning import OneWarning
from ._batch_checks import warn_uneven
from ._marks import Recorder
from ._tickets import Match, Ticket, Weight, known

# Scales are compared while that is new, and now and then, however late sizes begin to differ.
_EQUAL_STEPS = 8  # they show the noise
_UNEQUAL_STEPS = 64
_EVERY = 16
_CHUNK = 1 << 14  # elements that are copied at once, in the cache


@final
class Look:
    """Sums over a gradient or a loss, which a device may not have computed yet.

    From a device it is copied into pinned memory, on the stream that makes it, and an event shows
    when it is there: the host never waits for it.

    Args:
        total: the sum; where it shows a scale, that of absolute values, and that of the squares of
            their sums by row.
        is_half: whether it is one of half precision, where a loss scale may be too large.
        output: which output of the model it shows the scale of; ``~output`` in a backward for the
            gradient of an input alone, and None if it shows none.
    """

    __slots__ = ("_copied", "_total", "is_half", "output")

    def __init__(self, total: torch.Tensor, *, is_half: bool, output: int | None) -> None:
        self.is_half = is_half
        self.output = output
        self._total = total.detach()
        self._copied: torch.cuda.Event | None = None
        if total.is_cuda:
            self._total = torch.empty(total.shape, dtype=total.dtype, pin_memory=True)
            self._total.copy_(total.detach(), non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(total.device))

    def values(self) -> list[float] | None:
        """Return the sums; None while a device has not got there."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            return None
        return self._total.reshape(-1).tolist()


def look_at(
    tensor: torch.Tensor,
    looks: list[Look],
    *,
    output: int | None = None,
    is_half: bool | None = None,
) -> None:
    """Look whether all of a gradient, or of a loss, is finite: its sum is not otherwise.

    Args:
        tensor: of one that is spread over ranks, this rank's part is looked at.
        looks: gets what is left to be read; nothing for what is known to be finite.
        output: which output it is of, to have its scale; None for its sum.
        is_half: whether it was computed in half precision; None if its type says so.
    """
    if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
        tensor = tensor.to_local()  # summing all of it would be a collective
    if tensor.dtype.is_complex:
        tensor = tensor.abs()
    is_half = tensor.dtype == torch.float16 if is_half is None else is_half
    if output is not None:
        by_row = _by_row(tensor)
        sums = torch.stack((by_row.sum(), by_row.square().sum()))
        looks.append(Look(sums, is_half=is_half, output=output))
        return
    kind = torch.float32 if tensor.itemsize == 2 else None  # half may overflow
    total = tensor.sum(dtype=kind)
    if total.is_cuda or not math.isfinite(total.item()):
        looks.append(Look(total, is_half=is_half, output=None))


def _by_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of absolute values of each row, without a copy of all of ``tensor``."""
    # Absolute values add up to what overflows where every one of them is finite.
    kind = torch.float64 if tensor.device.type in ("cpu", "cuda") else torch.float32
    if tensor.ndim < 2:
        return tensor.reshape(-1).abs().to(kind)
    inside = tuple(range(1, tensor.ndim))
    if tensor.device.type != "cpu":
        norms: torch.Tensor = torch.linalg.vector_norm(tensor, 1, dim=inside, dtype=kind)
        return norms
    # Torch's norm is 30 times as slow on a CPU.
    if tensor.numel() > _CHUNK * len(tensor):
        return torch.stack([_by_row(row).sum() for row in tensor])
    parts = torch.split(tensor, max(1, _CHUNK * len(tensor) // max(tensor.numel(), 1)))
    return torch.cat([part.abs().sum(dim=inside, dtype=kind) for part in parts])


@final
class OutputWatch:
    """Reports to rank 0 in which steps a loss was not finite, and the scales of gradients.

    Args:
        exchange: carries the news.
        compares: whether scales are compared between ranks.

    Attributes:
        resting: the plan under which nothing is left to be compared.
        unread: what a device may not have computed yet, with its model and batch.
    """

    def __init__(self, exchange: Exchange, *, compares: bool) -> None:
        self._exchange = exchange
        self._compares = compares
        self._num_equal = self._num_unequal = 0
        self._step: StepState | None = None  # whose scales are collected
        self._scales: dict[tuple[int, int], dict[Ticket, tuple[float, float]]] = {}
        self.unread: deque[tuple[int, Ticket, Look]] = deque()
        self.resting: Plan | None = None

    def begin_step(self, step: StepState) -> None:
        """Decide, alike on all ranks, whether the scales of a step are compared."""
        plan = step.plan
        # By cost, a rank with fewer samples has longer ones, whose gradients may be others.
        confounds = plan is not None and plan.costs is not None and step.units is None
        if not self._compares or plan is None or confounds:
            self.resting = plan
        elif len(set(plan.batch_size)) == 1 and plan.costs is None:
            self._num_equal += 1
            step.compares = self._num_equal <= _EQUAL_STEPS
            self.resting = None if step.compares else plan
        else:
            self._num_unequal += 1
            step.compares = self._num_unequal <= _UNEQUAL_STEPS or not self._num_unequal % _EVERY

    def note(self, model: int, ticket: Ticket, looks: list[Look]) -> None:
        """Take over what a backward through a forward of ``ticket`` has seen."""
        self.unread.extend((model, ticket, look) for look in looks)
        looks.clear()  # there may be another backward through it

    def read(self) -> None:
        """Read what is known by now."""
        while self.unread:
            model, ticket, look = self.unread[0]
            values = look.values()
            if values is None:
                return
            self.unread.popleft()
            if not math.isfinite(values[0]):
                self._exchange.not_finite.report(ticket.step.number, is_half=look.is_half)
            elif look.output is not None and values[0] and values[1] < math.inf:
                self._collect((model, look.output), ticket, *values)

    def report(self) -> None:
        """Send the scales of the step that is collected."""
        step, self._step = self._step, None
        scales, self._scales = self._scales, {}
        if step is None:
            return
        rows = [(*key, *_mean_of_logs(parts)) for key, parts in scales.items()]
        self._exchange.send([ScalesReport(step.number, tuple(rows))])

    def _collect(self, key: tuple[int, int], ticket: Ticket, scale: float, squares: float) -> None:
        if not ticket.num_samples:
            return  # a stand-in
        if ticket.step is not self._step:
            self.report()
            self._step = ticket.step
        parts = self._scales.setdefault(key, {})
        before, squares_before = parts.get(ticket, (0.0, 0.0))
        parts[ticket] = before + scale, squares_before + squares


def _mean_of_logs(parts: Mapping[Ticket, tuple[float, float]]) -> tuple[float, float, float]:
    """Return scale, size and the variance of the scale's logarithm, for parts of a batch.

    Of a sum over n rows that are drawn alike, it is $\\sum s_i^2 / s^2 - 1 / n$. A single number,
    as a loss, says nothing of its rows: they are taken to scatter by their own mean.
    """
    logs = sizes = variance = 0.0
    for ticket, (scale, squares) in parts.items():
        logs += math.log(scale)
        sizes += math.log((ticket.num_samples if ticket.units is None else ticket.units) or 1.0)
        ratio, n = squares / scale / scale, ticket.num_samples  # the square may be too small
        variance += 1.0 / n if math.isclose(ratio, 1.0) else max(ratio - 1.0 / n, 0.0)
    count = len(parts)
    return math.exp(logs / count), math.exp(sizes / count), variance / count**2


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
        self._warn = OneWarning()

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
        if not self._warn.said:
            warn_uneven(uses, self._warn)
        checksum = 0
        if not maybe:
            for one in {use.ticket.step for use in uses}:
                checksum ^= one.checksum
        return Reduced(model, number, shares, tuple(sorted(maybe)), checksum)
