"""What the gradient of a batch is multiplied by."""

from __future__ import annotations

from functools import partial
from typing import Any

from .._exchange._exchange import Exchange
from .._exchange._unit_sums import UnitSum
from .._run._step_under_way import StepUnderWay
from ._clock import StepMeter
from ._model._protocols import Weight


class Weights:
    r"""Weighs batches so that the plain mean over ranks is the mean over the global batch.

    $n W / N$ for the $n$ samples of a batch, of $N$ in the step over $W$ ranks; $u W / U$ where the
    loss is a mean over other units. A sum is left as it is.

    Args:
        exchange: sums units over ranks.
        meter: leaves out the wait for other ranks' units.
        world_size: number of workers.
        loss_reduction: ``"mean"`` or ``"sum"``, what the user's loss does over samples.
    """

    def __init__(
        self, exchange: Exchange, meter: StepMeter, *, world_size: int, loss_reduction: str
    ) -> None:
        self._exchange = exchange
        self._meter = meter
        self._world_size = world_size
        self._sums = loss_reduction == "sum"

    def of(self, step: StepUnderWay, num_samples: int, units: float | None) -> tuple[Weight, Any]:
        """Return the weight of a batch of ``step``, and what is equal where batches weigh alike."""
        if step.unit_sum is not None:
            assert units is not None, "every batch of a step that counts units counts its own"
            return partial(self._by_units, step.unit_sum, units), (step, units)
        if self._sums:
            weight = 1.0 if num_samples else 0.0
        else:
            weight = num_samples * self._world_size / step.global_num_samples
        return weight, weight

    def _by_units(self, unit_sum: UnitSum, units: float) -> float:
        """Return the weight of a forward with ``units``, when all ranks have told theirs.

        Called in the backward. A step without a single unit has nothing to learn from: weight 0.
        """
        if unit_sum.total is None:  # others are late: that is no time of this rank's own
            begin = self._meter.clock.mark()
            self._exchange.units.wait(unit_sum)
            self._meter.exclude(begin, self._meter.clock.mark())
        total = unit_sum.total
        return units * self._world_size / total if total else 0.0
