"""Find out, once at the start, whether weights can make a loss exact on uneven batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...exceptions import invalid
from ._units import unit_counter

LossKind = Literal["mean", "sum", "units", "neither"]

_LEAST = 6  # samples, for three parts of different sizes


@dataclass(frozen=True, slots=True)
class LossCheck:
    """What a loss does over the samples of a batch.

    Attributes:
        kind: ``"mean"`` over samples, ``"sum"`` over samples, ``"units"`` for a mean over other
            units such as valid targets, or ``"neither"`` if it is not a sum over samples.
        shares: weights of the gradients of three parts in the gradient of the whole batch.
        error: largest relative difference between the whole and the weighted sum of its parts, in
            value and gradient. Only rounding, except for ``"neither"``.
    """

    kind: LossKind
    shares: tuple[float, ...]
    error: float


@dataclass(frozen=True, slots=True)
class _Part:
    """What the loss gives for some rows: its value, and the gradient with respect to them."""

    num_samples: int
    value: float
    gradient: torch.Tensor


def check_loss(
    loss_fn: Callable[..., torch.Tensor],
    *tensors: torch.Tensor,
    reduction: Literal["mean", "sum"] = "mean",
    unit: Literal["samples"] | Callable[[Any], float] = "samples",
) -> LossCheck:
    r"""Check on a small batch that ``loss_fn`` is the mean or sum that the balancer expects.

    The batch is cut into three parts of different sizes. Let $L$ be the loss of the whole, $L_i$
    that of a part, and $g$ gradients with respect to the part's own rows. A loss is a sum over
    samples up to a weight exactly if $g_i(L) = s_i\, g(L_i)$ and $L = \sum_i s_i L_i$ with numbers
    $s_i$: $n_i / N$ for a mean over samples, $1$ for a sum, $u_i / U$ for a mean over other units.
    If the loss compares samples (contrastive losses, hard triplets, batch normalization inside
    ``loss_fn``), there are no such numbers.

    It examines only the batch that it gets: a batch without padding, or with equal padding in every
    part, says nothing about padding. Right for losses that give the same value when called again:
    put dropout into evaluation mode.

    Usage:
        check_loss(torch.nn.CrossEntropyLoss(), logits, labels)

    Args:
        loss_fn: called with ``tensors``, whole and in parts; returns a scalar.
        tensors: the arguments of the loss, each of shape ``(n, ...)`` with at least 6 samples, in
            single or double precision. The gradient is taken with respect to those that require
            one, otherwise to the first one of floating point.
        reduction: the balancer's ``loss_reduction``.
        unit: the balancer's ``unit``; here a function gets the tuple of a part's tensors.

    Returns:
        The result, if it agrees with ``reduction`` and ``unit``.

    Raises:
        ValueError: the loss is something else, and the message says what, with the remedy; or this
            batch is not sufficient to find out.
    """
    _check_tensors(tensors)
    whole = _evaluate(loss_fn, tensors)
    sizes = _sizes(len(tensors[0]))
    parts, units, first = [], [], 0
    for size in sizes:
        rows = tuple(tensor[first : first + size] for tensor in tensors)
        parts.append(_evaluate(loss_fn, rows))
        units.append(float(size) if unit == "samples" else unit_counter(unit)(rows))
        first += size
    found = _classify(whole, parts, tolerance=_tolerance(tensors))
    _check_found(found, reduction, units, given=unit != "samples", tolerance=_tolerance(tensors))
    return found


def _evaluate(loss_fn: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> _Part:
    """Return value and gradient of the loss on copies of ``tensors``."""
    wanted = [tensor.requires_grad for tensor in tensors]
    if not any(wanted):
        wanted[[tensor.is_floating_point() for tensor in tensors].index(True)] = True
    copies = [
        tensor.detach().clone().requires_grad_(need)
        for tensor, need in zip(tensors, wanted, strict=True)
    ]
    with torch.enable_grad():
        loss = loss_fn(*copies)
        again = loss_fn(*copies)
    _check_scalar(loss)
    value = float(loss.detach())
    if math.isfinite(value) and value != float(again.detach()):
        raise invalid(
            "check_loss(loss_fn)",
            "give the same value when called again",
            f"{value} and {float(again.detach())}",
            "Leave out random numbers: put dropout into evaluation mode.",
        )
    leaves = [copy for copy in copies if copy.requires_grad]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    flat = [
        (torch.zeros_like(leaf) if gradient is None else gradient).double().reshape(len(leaf), -1)
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    return _Part(len(copies[0]), value, torch.cat(flat, dim=1))


def _check_scalar(loss: Any) -> None:
    problem = repr(loss)[:80]
    if isinstance(loss, torch.Tensor):
        problem = "" if loss.requires_grad else "one that needs no gradient"
        problem = problem if loss.numel() == 1 else f"one of shape {tuple(loss.shape)}"
    if problem:
        raise invalid(
            "check_loss(loss_fn)",
            "return a scalar tensor that depends on its arguments",
            problem,
            "Reduce the loss over the batch, as the training loop does.",
        )


def _classify(whole: _Part, parts: Sequence[_Part], *, tolerance: float) -> LossCheck:
    scale = float(whole.gradient.norm())
    if not (math.isfinite(scale) and scale and math.isfinite(whole.value)):
        raise _uninformative(f"a loss of {whole.value} with a gradient of norm {scale}")
    shares, worst, first = [], 0.0, 0
    for part in parts:
        inside = whole.gradient[first : first + part.num_samples]
        share, error = _share(inside, part)
        shares.append(share)
        worst = max(worst, error / scale)
        first += part.num_samples
    known = zip(shares, parts, strict=True)
    values = [share * part.value for share, part in known if share]
    difference = abs(math.fsum(values) - whole.value)
    worst = max(worst, difference / max(abs(whole.value), *map(abs, values), 1e-300))
    by_samples = [part.num_samples / whole.num_samples for part in parts]
    kind: LossKind = "neither"
    if worst <= tolerance:
        if _close(shares, by_samples, tolerance):
            kind = "mean"
        elif _close(shares, [1.0] * len(parts), tolerance):
            kind = "sum"
        elif _close([math.fsum(shares)], [1.0], tolerance):
            kind = "units"
    return LossCheck(kind, tuple(shares), worst)


def _share(inside: torch.Tensor, part: _Part) -> tuple[float, float]:
    """Return the number that turns the part's gradient into the whole's, and what is left."""
    if not float(inside.norm()) and not math.isfinite(part.value):
        return 0.0, 0.0  # a mean over nothing
    squared = float((part.gradient**2).sum())
    if not squared:
        if not float(inside.norm()):
            raise _uninformative(f"{part.num_samples} samples in a row without a gradient")
        return 0.0, float(inside.norm())
    share = float((inside * part.gradient).sum()) / squared
    return share, float((inside - share * part.gradient).norm())


def _check_found(
    found: LossCheck, reduction: str, units: Sequence[float], *, given: bool, tolerance: float
) -> None:
    """Raise if the loss is not what was said."""
    if found.kind == "neither":
        raise _refused(
            "a loss that is not a sum over samples: no weight makes it exact on uneven batches",
            "Losses over pairs, such as contrastive losses and triplets, need a batch that is "
            "gathered over ranks, or equal sizes (`policy='equal'`). A term that does not depend "
            "on the samples belongs in a mean, not in a sum. Of two means over different units, as "
            'pairs and tokens, weight one: `prepare(..., weighting="loss")` and '
            "`balancer.weight(mean) + sum * world_size / count_of_all_ranks`.",
        )
    if reduction == "sum":
        if found.kind != "sum":
            raise _refused(f"a {_NAMES[found.kind]}", "Leave `loss_reduction='sum'` out.")
        return
    if found.kind == "sum":
        raise _refused("a sum over samples", "Use `Balancer(loss_reduction='sum')`.")
    total = math.fsum(units)
    said = [each / total if total else 0.0 for each in units]
    if _close(found.shares, said, tolerance):
        return
    shares = ", ".join(f"{share:.4g}" for share in found.shares)
    if given:
        raise _refused(
            f"a {_NAMES[found.kind]}, with shares {shares} for three parts where `unit` says "
            + ", ".join(f"{share:.4g}" for share in said),
            "Have `unit` return what the loss divides by.",
        )
    raise _refused(
        f"a mean over units other than samples, with shares {shares} for parts of "
        f"{', '.join(f'{each:.0f}' for each in units)} samples",
        "Use `Balancer(unit=...)` with a function that returns what the loss divides by: the "
        "number of valid targets, or the sum of their class weights.",
    )


_NAMES = {"mean": "mean over samples", "sum": "sum over samples", "units": "mean over other units"}


def _refused(found: str, remedy: str) -> ValueError:
    return invalid("check_loss(loss_fn)", "agree with the balancer's settings", found, remedy)


def _uninformative(found: str) -> ValueError:
    return invalid(
        "check_loss(*tensors)",
        "be a batch that shows what the loss does",
        found,
        "Give random predictions, and targets as real batches have them.",
    )


def _check_tensors(tensors: Sequence[Any]) -> None:
    rows = {len(t) if isinstance(t, torch.Tensor) and t.dim() else 0 for t in tensors}
    if len(rows) != 1 or min(rows) < _LEAST:
        raise invalid(
            "check_loss(*tensors)",
            f"be tensors with one row for each of at least {_LEAST} samples",
            [tuple(t.shape) if isinstance(t, torch.Tensor) else repr(t)[:40] for t in tensors],
            "Bind arguments without a row per sample into `loss_fn`.",
        )
    if not any(t.dtype in (torch.float32, torch.float64) for t in tensors):
        raise invalid(
            "check_loss(*tensors)",
            "hold predictions in single or double precision",
            [str(t.dtype) for t in tensors],
            "Give what the loss is differentiated by, as `.float()`.",
        )


def _sizes(num_samples: int) -> tuple[int, int, int]:
    large, middle = num_samples // 2, num_samples // 3
    return large, middle, num_samples - large - middle


def _tolerance(tensors: Sequence[torch.Tensor]) -> float:
    kinds = [t.dtype for t in tensors if t.dtype in (torch.float32, torch.float64)]
    return math.sqrt(max(torch.finfo(kind).eps for kind in kinds))


def _close(numbers: Sequence[float], wanted: Sequence[float], tolerance: float) -> bool:
    return all(abs(a - b) <= tolerance for a, b in zip(numbers, wanted, strict=True))
