"""What a loss is a mean over when that is not samples: the units in a batch, counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from ...exceptions import invalid

Unit = Literal["samples", "tokens"] | Callable[[Any], float]

_IGNORED = -100  # `ignore_index` of torch's cross entropy, and so of every Hugging Face model


class UnitCounter:
    r"""Counts the units of a batch, so that a forward weighs $u W / U$.

    $u$ are the units in the forward, $W$ the workers and $U$ the units of the step over all of
    them. Exact for every loss that is $\sum_j \ell_j / u$ over its forward: a mean over valid
    targets, or a weighted mean, whose units are the weights' sum.

    Args:
        unit: ``"tokens"``, or a function of a batch as the loop gets it.
    """

    def __init__(self, unit: Literal["tokens"] | Callable[[Any], float]) -> None:
        self._count = count_tokens if unit == "tokens" else unit
        assert callable(self._count)

    def __call__(self, batch: Any) -> float:
        """Return the units in ``batch``.

        Raises:
            ValueError: the function's result is no finite number of at least 0.
        """
        given = self._count(batch)
        try:
            units = float(given)
        except (TypeError, ValueError, RuntimeError):  # of text, of a tensor with many elements
            units = math.nan
        if not (math.isfinite(units) and units >= 0.0):
            raise invalid(
                "Balancer(unit=...)",
                "return one finite number of at least 0 for every batch",
                repr(given)[:80],
                "Return what the loss divides by: the number of its targets, or their weights' "
                "sum.",
            )
        return units


def counter_of(unit: Any, *, loss_reduction: str) -> UnitCounter | None:
    """Return what counts ``unit`` in a batch; None for samples, which the loader knows.

    Raises:
        ValueError: ``unit`` is neither a name nor a function, or the loss is a sum.
    """
    if unit == "samples":
        return None
    if unit != "tokens" and not callable(unit):
        raise invalid(
            "Balancer(unit=...)",
            'be "samples", "tokens" or a function of a batch',
            repr(unit),
            "For other targets, give a function that counts them in a batch.",
        )
    if loss_reduction == "sum":
        raise invalid(
            "Balancer(unit=...)",
            'be "samples" with `loss_reduction="sum"`',
            repr(unit),
            "A sum counts every target once however the batch is split: leave `unit` out.",
        )
    return UnitCounter(unit)


def count_tokens(batch: Any) -> int:
    """Return the targets in a batch as Hugging Face's collators make them.

    The first of these that the mapping holds:

    - ``"shift_labels"``: those other than -100;
    - ``"labels"``: those other than -100; where they repeat ``"input_ids"``, as a causal language
      model's do, without the first of each row. Such a model predicts ``labels[..., 1:]``;
    - ``"attention_mask"``: the tokens that it marks.

    Raises:
        ValueError: the batch is no mapping, or holds none of them.
    """
    fields = batch if isinstance(batch, Mapping) else {}
    targets = fields.get("shift_labels", fields.get("labels"))
    if isinstance(targets, torch.Tensor):
        if "shift_labels" not in fields and _repeat(targets, fields.get("input_ids")):
            targets = targets[..., 1:]
        return int((targets != _IGNORED).sum())
    mask = fields.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return int((mask != 0).sum())
    raise invalid(
        'Balancer(unit="tokens")',
        "get batches that are mappings with tensors under `labels` or `attention_mask`",
        f"a mapping with {sorted(map(str, fields))}" if fields else f"a {type(batch).__name__}",
        "Give a function that counts the targets in a batch, such as "
        "`Balancer(unit=lambda batch: (batch[1] != -100).sum())`.",
    )


def _repeat(labels: torch.Tensor, input_ids: Any) -> bool:
    """Tell whether every label is the token that stands there: then the model shifts them."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.shape != labels.shape:
        return False
    return bool(((labels == input_ids) | (labels == _IGNORED)).all())
