"""What a loss is a mean over when that is not samples: the units in a batch, counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn

from ..._private_torch import original_of
from ..._warning import warn
from ...exceptions import invalid
from ._compiled import ddp_of

Unit = Literal["samples", "tokens"] | Callable[[Any], float]

_IGNORED = -100  # `ignore_index` of torch's cross entropy, and so of every Hugging Face model
# Of transformers' `loss_type` and, where that is None, of its classes: their loss shifts labels.
_SHIFTS = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")
_OVER_TOKENS = (*_SHIFTS, "ForMaskedLM", "ForTokenClassification")
_SHIFTS_BY_NAME = ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel", "CTRLLMHeadModel", "BertLMHeadModel")


def unit_counter(
    unit: Literal["tokens"] | Callable[[Any], float],
    modules: Callable[[], Iterable[nn.Module]] = tuple,
) -> Callable[[Any], float]:
    r"""Return what counts the units of a batch, so that a forward weighs $u W / U$.

    $u$ are the units in the forward, $W$ the workers and $U$ the units of the step over all of
    them. Exact for every loss that is $\sum_j \ell_j / u$ over its forward: a mean over valid
    targets, or a weighted mean, whose units are the weights' sum. What it returns raises a
    ``ValueError`` where ``unit`` returns no finite number of at least 0.

    Args:
        unit: ``"tokens"``, or a function of a batch as the loop gets it.
        modules: returns the prepared models, which are asked once whether they shift labels.
    """
    shifts = cache(lambda: shifts_labels(modules()))
    count = partial(count_tokens, shifts=shifts) if unit == "tokens" else unit
    assert callable(count)

    def units_in(batch: Any) -> float:
        given = count(batch)
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

    return units_in


def counter_of(
    unit: Any, *, loss_reduction: str, modules: Callable[[], Iterable[nn.Module]]
) -> Callable[[Any], float] | None:
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
    return unit_counter(unit, modules)


def count_tokens(batch: Any, *, shifts: Callable[[], bool]) -> int:
    """Return the targets in a batch as Hugging Face's collators make them.

    The first of these that the mapping holds:

    - ``"shift_labels"``: those other than -100;
    - ``"labels"``: those other than -100; without the first of each row where the model shifts
      them, as a causal language model does: it predicts ``labels[..., 1:]``;
    - ``"attention_mask"``: the tokens that it marks.

    Args:
        batch: as the loop gets it.
        shifts: returns whether the model shifts labels; called only where that makes a difference.

    Raises:
        ValueError: the batch is no mapping, or holds none of them.
    """
    fields = batch if isinstance(batch, Mapping) else {}
    targets = fields.get("shift_labels", fields.get("labels"))
    if isinstance(targets, torch.Tensor):
        if "shift_labels" not in fields and shifts():
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


def warned_of_tokens(module: nn.Module) -> bool:
    """Warn if a model of transformers returns a mean over tokens; return whether it does."""
    ddp = ddp_of(module)
    model = original_of(module) if ddp is None else ddp.module
    loss_type = _loss_type(model)
    if loss_type not in _OVER_TOKENS:
        return False
    warn(
        f"The loss that {type(model).__name__} returns is a mean over tokens (its `loss_type` is "
        f"{loss_type}), and forwards are weighted by samples. If you train on that loss, set "
        f'`unit="tokens"`; on a sum that you divide by the tokens of all ranks, set '
        f'`loss_reduction="sum"`.'
    )
    return True


def shifts_labels(modules: Iterable[nn.Module]) -> bool:
    """Return whether the loss of the models predicts ``labels[..., 1:]``, by their kind.

    Never by a batch: a model that copies its input has labels like a causal one's.

    Raises:
        ValueError: no model says so, or they differ.
    """
    outer = list(modules)
    found = set(map(shifting, outer)) - {None}
    if len(found) != 1:
        raise invalid(
            'Balancer(unit="tokens")',
            "be used with a model of transformers, whose kind tells whether it shifts labels",
            " and ".join(type(module).__name__ for module in outer) or "no model",
            "Say which labels count: `Balancer(unit=lambda batch: (batch['labels'][..., 1:] != "
            "-100).sum())` for a causal language model, `(batch['labels'] != -100)` for others.",
        )
    return bool(found.pop())


def shifting(model: nn.Module) -> bool | None:
    """Return whether a model, or its outermost part that says so, shifts labels; else None."""
    return next((found for found in map(_shifts, model.modules()) if found is not None), None)


def _shifts(module: nn.Module) -> bool | None:
    """Return whether a module shifts labels, by transformers' own rule; None where it has none."""
    if (loss_type := _loss_type(module)) is None:
        return None
    is_encoder_decoder = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return loss_type in _SHIFTS and not is_encoder_decoder


def _loss_type(module: nn.Module) -> str | None:
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if kinds & set(_SHIFTS_BY_NAME):
        return "ForCausalLM"
    found = getattr(module, "loss_type", None)
    return found if isinstance(found, str) and "For" in found else None
