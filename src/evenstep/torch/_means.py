"""Means over all ranks that are exact for uneven batches."""

from __future__ import annotations

import torch

from ._conductor import StepConductor
from ._exchange._startup import Alone, SideGroup
from ._no_steps import NoSteps


def mean_over(
    side: SideGroup | Alone | None,
    steps: StepConductor | NoSteps,
    value: float | torch.Tensor,
    count: float | None,
) -> float:
    """Return the mean of every rank's ``value``, each over ``count``; NaN over nothing. Collective.

    A value over nothing is left out, also where it is none.

    Args:
        side: the workers; None before ``prepare``.
        steps: know what the one under way has.
        value: this rank's mean.
        count: over what; None is the units of the step under way.

    Raises:
        RuntimeError: no step is under way that could tell the count.
    """
    if count is None:
        count = steps.num_units
    if count is None or side is None:
        raise RuntimeError(
            "No training step is under way, so it is unknown how many samples the value is a "
            "mean of: give `balancer.mean(value, count=...)`, after `prepare`."
        )
    steps.report_now()
    given = value.detach() if isinstance(value, torch.Tensor) else value
    number = float(given) if count else 0.0
    total, samples = side.sum(torch.tensor([number * count, count], dtype=torch.float64)).tolist()
    return float(total / samples) if samples else float("nan")
