"""Checks of the loss in every run, on rank 0: that it divides by what was said, and is finite.

The gradient at a model's output shows by what a loss divides. Its sum of absolute values over the
output does not depend on the number of rows if the loss is a mean over them, and is proportional to
that number if it is a sum, whatever the shape. Ranks are compared within a step, as training
changes all of them.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Literal, final

import numpy as np

from .._types import FloatArray
from ..events import Hook, LossNotFinite
from ..exceptions import invalid
from ._message_kinds import GradientsWrong, Message, NotFiniteReport, ScaleRow, ScalesReport
from ._router import Router

Slope = Literal["mean", "sum", "between"]
"""What a loss was found to be: flat in the number of rows, proportional to it, or neither."""

_ODDS = math.log(1e6)
# By what the variances that ranks report may be wrong: rows may resemble each other.
_FACTORS = np.geomspace(1e-3, 1e3, 25)
_LIKELY = -(np.log(_FACTORS) ** 2) / 2.0
_SLOPES = np.array([0.0, 1.0, *np.linspace(0.25, 0.75, 11)])  # a mean, a sum, and between
_POWERS = np.array([np.ones_like(_SLOPES), -2.0 * _SLOPES, _SLOPES**2])  # (3, slopes)
# By how much a rank's scale may differ at equal sizes, and how likely that is. Samples that are
# drawn at random are the same everywhere. In an order of the user's own, or in shards, one rank may
# have what is hard, and only a change of sizes shows it.
_AT_RANDOM = ((1.0, 0.02),)
_BY_ORDER = ((0.90, 0.03), (0.08, 0.3), (0.02, 2.0))
_LEAST_PART = 2  # samples: the mean of a single one is too low, for its logarithm
_LEAST_SPREAD = 0.02  # of sizes: less changes no gradient by a percent
_LEAST_STEPS = 2
_LEAST_VARIANCE = 1e-4
_LEAST_UNLIKE = 1e-3  # gradients of ranks: rounding in half precision
_MOST_OPEN = 64  # steps that some ranks have reported and some have not

# Steps in a row after which it is no passing matter. One or two are what scripts skip by hand, or
# what a loss scale that has grown too far for single precision costs before it shrinks.
_PLAIN = 5
# In half precision a loss scale may be too large: torch's `GradScaler` begins with 2**16, skips
# such a step and halves it. After 16 of them it is 1, and what still overflows is the loss itself.
_HALF = 17


@final
class LossTrial:
    r"""Decides between a mean and a sum by the scales of gradients, step by step.

    With $s_r$ the sum of absolute values of rank r's gradient in a step, and $n_r$ its samples:

    .. math:: \log s_r = c + d_r + \beta \log n_r + \epsilon_r, \qquad
        \epsilon_r \sim N(0, k v_r)

    c belongs to the step and is taken out, $d_r$ to the rank. $\beta$ is 0 for a mean over
    anything, 1 for a sum, for a constant divisor, and for a count over all ranks. $v_r$ is what the
    rows of the rank's own gradient scatter by. The odds of 1 against 0 are those of a normal prior
    of $d_r$ and a log-normal one of k, with a median of 1. Undecided is an outcome.

    Right where a sample's gradient does not depend on which others are in its part. A loss over
    pairs, as InfoNCE, may look like anything.

    Args:
        world_size: number of ranks.
        at_random: whether samples are drawn at random, so that no rank differs at equal sizes.
    """

    def __init__(self, world_size: int, *, at_random: bool) -> None:
        self._spreads = _AT_RANDOM if at_random else _BY_ORDER
        self._weight, self._sum, self._sum_x = np.zeros((3, world_size))
        self._squares = np.zeros(3)  # of log scales, of them times log sizes, of log sizes
        self._degrees = 0
        self._num_unequal = 0
        self._before: Slope | None = None

    def add(self, scale: FloatArray, size: FloatArray, variance: FloatArray) -> Slope | None:
        """Take in a step, and return what the loss is; None while that is not decided.

        Args:
            scale: ``(world_size,)``; what is not positive and finite is left out.
            size: ``(world_size,)``, samples or other units behind each.
            variance: ``(world_size,)``, of the scale's natural logarithm.
        """
        counts = np.isfinite(scale) & np.isfinite(variance)
        counts &= (scale > 0.0) & (size >= _LEAST_PART)
        if counts.sum() < 2:
            return None
        weight = np.where(counts, 1.0 / np.maximum(variance, _LEAST_VARIANCE), 0.0)
        y, x = (_centred(np.log(np.where(counts, one, 1.0)), weight) for one in (scale, size))
        self._weight += weight
        self._sum += weight * y
        self._sum_x += weight * x
        self._squares += [weight @ (y * y), weight @ (y * x), weight @ (x * x)]
        self._degrees += int(counts.sum()) - 1
        if np.abs(x).max() < _LEAST_SPREAD:
            return None
        self._num_unequal += 1
        before, self._before = self._before, self._judged()
        enough = self._num_unequal > _LEAST_STEPS and before == self._before
        return self._before if enough else None

    def _judged(self) -> Slope | None:
        mean, total, *others = self._evidence()
        between = _log_mean(np.array(others))
        if between - max(mean, total) >= _ODDS:
            return "between"
        if abs(total - mean) < _ODDS:
            return None
        return "sum" if total > mean else "mean"

    def _evidence(self) -> FloatArray:
        """Return how well each of ``_SLOPES`` explains the steps: its likelihood's logarithm."""
        own = np.array([self._sum**2, self._sum * self._sum_x, self._sum_x**2])
        found = []
        for part, spread in self._spreads:
            ratio = _FACTORS[:, None] / spread**2
            left = self._squares - (1.0 / (self._weight + ratio)) @ own.T  # (factors, 3)
            known = np.log1p(self._weight / ratio).sum(axis=1) + self._degrees * np.log(_FACTORS)
            explained = _LIKELY + math.log(part) - known / 2
            found.append(explained - (left @ _POWERS).T / (2.0 * _FACTORS))
        return np.array([_log_mean(logs) for logs in np.concatenate(found, axis=1)])


def _centred(values: FloatArray, weight: FloatArray) -> FloatArray:
    mean = float(weight @ values) / float(weight.sum())
    return values - mean


def _log_mean(logs: FloatArray) -> float:
    most = logs.max()
    return float(most + np.log(np.exp(logs - most).mean()))


@final
class LossScales:
    """The parts of all ranks: each sends its scales, rank 0 judges, and all learn if it is wrong.

    Args:
        router: carries messages.
        refuse: called on rank 0, from any thread, if the loss is not what it was said to be.
        warn: gets a sentence on rank 0 if it is neither, and training continues.
    """

    kinds = (ScalesReport,)

    def __init__(
        self,
        router: Router,
        *,
        refuse: Callable[[GradientsWrong], None],
        warn: Callable[[str], object],
    ) -> None:
        self._world_size = router.world_size
        self._refuse = refuse
        self._warn = warn
        self._lock = threading.Lock()
        self._reported: dict[int, dict[int, tuple[ScaleRow, ...]]] = {}  # by step and rank
        self._trials: dict[tuple[int, int], LossTrial] = {}
        self._found: dict[tuple[int, int], Slope] = {}
        self._warned: set[str] = set()
        self._said = "mean"
        self._at_random = False

    def open(self, loss_reduction: str, *, at_random: bool) -> None:
        """Note what the user said of the loss, and whether samples are drawn at random."""
        self._said, self._at_random = loss_reduction, at_random

    def received(self, peer: int, message: Message) -> None:
        """On rank 0: take in a rank's scales of a step; judge once those of all are there."""
        assert isinstance(message, ScalesReport)
        step = message.step
        with self._lock:
            reported = self._reported.setdefault(step, {})
            reported[peer] = message.rows
            if len(self._reported) > _MOST_OPEN:
                del self._reported[min(self._reported)]
            if len(reported) < self._world_size:
                return
            del self._reported[step]
            news = self._judge(reported)
        if news in _WARNED and news not in self._warned:
            self._warned.add(news)
            self._warn(f"Up to step {step}, {_SEEN} {_FOUND[news][0]}. {_FOUND[news][1]}")
        elif news is not None and news not in _WARNED:
            self._refuse(GradientsWrong(_refusal(self._said, news, step)))

    def _judge(self, reported: Mapping[int, tuple[ScaleRow, ...]]) -> str | None:
        """Return what is new and not as it was said, if anything is."""
        columns: defaultdict[tuple[int, int], FloatArray] = defaultdict(
            lambda: np.zeros((3, self._world_size))
        )
        for rank, rows in reported.items():
            for model, output, *column in rows:
                columns[model, output][:, rank] = column
        news: set[str] = set()
        for key in columns:
            if _is_shared(*columns[key]):
                continue
            found = self._trial(key).add(*columns[key])
            if found is not None:
                del self._trials[key]  # a loss may become another one: the next steps begin anew
                if key[1] < 0:  # of backwards for inputs alone
                    news |= {"inputs"} if (self._said, found) == ("mean", "sum") else set()
                    continue
                news |= {found} - {self._found.get(key)}
                self._found[key] = found
        others = news - {self._said}
        if others <= _WARNED:
            return max(others, default=None)
        return "mixed" if self._said in self._found.values() else max(others)

    def _trial(self, key: tuple[int, int]) -> LossTrial:
        if key not in self._trials:
            self._trials[key] = LossTrial(self._world_size, at_random=self._at_random)
        return self._trials[key]


def _is_shared(scale: FloatArray, size: FloatArray, variance: FloatArray) -> bool:
    """Return whether an output is a number, and its gradient the same on all ranks.

    As that of a temperature in a loss that all ranks compute over all samples. Any weights that
    add up right are right for it.
    """
    alike = np.ptp(scale) <= _LEAST_UNLIKE * scale.max()
    return bool(alike and np.allclose(variance * size, 1.0))


_WARNED = {"between", "inputs"}
_SEEN = "gradients at the model's output, compared between ranks with different numbers of samples,"
_MIXED = (
    'use `prepare(..., weighting="loss")` and `balancer.weight(means) + sums`, with `unit=` if the '
    "means are over targets or class weights."
)
_PAIRS = (
    "If it compares the samples of a batch with each other, as contrastive losses do, use "
    '`policy="equal"`.'
)
_FOUND = {
    "sum": (
        "grew with these numbers, as those of a sum do",
        "If the loss is a sum, or divides by a constant or by a count over all ranks, use "
        '`Balancer(loss_reduction="sum")`, which is exact for each. If only some of its terms do, '
        f"{_MIXED} {_PAIRS}",
    ),
    "mean": (
        "did not depend on these numbers, as those of a mean",
        'Leave `loss_reduction="sum"` out.',
    ),
    "mixed": (
        "grew with these numbers at one output, as those of a sum do, and not at another",
        f"For a mean beside a sum, {_MIXED}",
    ),
    "between": (
        "depended on these numbers as those of neither a mean nor a sum",
        "No weight is right for the whole loss. If it adds a mean and a sum, or a term that is "
        f"divided by a count over all ranks, {_MIXED} {_PAIRS} `check_loss` tells which.",
    ),
    "inputs": (
        "grew with these numbers, as those of a sum do, in backwards for the gradient of an input, "
        "as `torch.autograd.grad` returns it",
        "That gradient has the weight of its batch, which is right for a mean over samples. If "
        "more than its sign or direction counts, call `model.module(x)` there, which has none.",
    ),
}
"""What gradients did, and what to do."""


def _refusal(said: str, found: str, step: int) -> str:
    seen, remedy = _FOUND[found]
    return str(
        invalid(
            f"Balancer(loss_reduction={said!r})",
            "be what the loss does, or gradients are wrong",
            f"another loss up to step {step}: {_SEEN} {seen}",
            f"{remedy} `check_loss` examines a loss by itself, and `Runtime(checks_loss=False)` "
            "turns this comparison off.",
        )
    )


@final
class NotFinite:
    """One rank's side of it. Finite steps send nothing; no rank waits for an answer.

    Rank 0 looks for steps in a row, of whichever ranks: one rank's NaN is in all parameters after
    the step, and so in all ranks' losses of the next. Steps may come in any order, as devices are
    read late.

    Args:
        router: carries messages.
        emit: takes the event, on rank 0.
    """

    kinds = (NotFiniteReport,)

    def __init__(self, router: Router, *, emit: Hook) -> None:
        self._router = router
        self._emit = emit
        self._lock = threading.Lock()
        self._newest = -1  # step that this rank has reported
        self._ranks: dict[int, set[int]] = {}  # on rank 0, by step; the newest ones
        self._half: set[int] = set()  # those in which it may be the loss scale
        self._is_said = False

    def report(self, step: int, *, is_half: bool) -> None:
        """Have rank 0 know that this rank's loss was not finite in ``step``.

        Args:
            step: in which it was not.
            is_half: whether that was seen in half precision.
        """
        if step != self._newest:  # else another backward of the same step
            self._newest = step
            self._router.to_leader(NotFiniteReport(step, is_half))

    def received(self, peer: int, message: Message) -> None:
        """On rank 0: take in that a rank's loss was not finite."""
        assert isinstance(message, NotFiniteReport)
        step = message.step
        with self._lock:
            if self._is_said:
                return
            self._ranks.setdefault(step, set()).add(peer)
            if message.is_half:
                self._half.add(step)
            newest = step
            while newest + 1 in self._ranks:
                newest += 1
            first = self._first(newest)
            for old in [old for old in self._ranks if old < first - _HALF]:
                del self._ranks[old]
                self._half.discard(old)
            most = _HALF if self._half.intersection(range(first, newest + 1)) else _PLAIN
            event = self._say(first) if newest - first + 1 >= most else None
        if event is not None:
            self._emit(event)

    def end(self, last_step: int) -> None:
        """On rank 0: say it of a run that ends so, however short.

        Args:
            last_step: the newest one that was reported.
        """
        with self._lock:
            newest = max(self._ranks, default=-1)
            ends_so = newest >= last_step and newest in self._ranks and newest not in self._half
            event = self._say(self._first(newest)) if ends_so else None
        if event is not None:
            self._emit(event)

    def _first(self, newest: int) -> int:
        """Return the step in which the ones in a row up to ``newest`` began."""
        first = newest
        while first - 1 in self._ranks:
            first -= 1
        return first

    def _say(self, first: int) -> LossNotFinite | None:
        """Return the event; None if it was said."""
        if self._is_said:
            return None
        self._is_said = True
        return LossNotFinite(first, tuple(sorted(self._ranks[first])))
