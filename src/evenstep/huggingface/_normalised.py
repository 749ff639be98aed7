"""What the loss of a `Trainer` divides by, found out once, and so what each forward weighs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .._warning import warn
from ..exceptions import invalid
from ..torch._data._step import Step
from ..torch._model._units import shifting
from ._gathering_loss import LossCalls
from ._portions import IGNORED, pieces_of

Divisor = Literal["items", "labels", "shifted labels", "samples"]

_OWN: tuple[Divisor, ...] = ("labels", "shifted labels", "samples")
_ROUNDING = 1e-6  # of losses, relative; less than that shows nothing
_SAME = 1e-4
_MOST_LOSSES = 5  # that are computed to find out


@dataclass(frozen=True, slots=True)
class Evidence:
    r"""What this rank's part of the first batch says; zeros where it says nothing.

    The loss $L$ of the whole part is compared with $\sum_i s_i L_i$ of two pieces of it, where
    $s_i$ are shares of the samples or of the targets.

    Attributes:
        loss: of the part.
        listens: how far the loss changes with twice as many items.
        off: distances of the sums weighted by labels, shifted labels and samples.
    """

    loss: float = 0.0
    listens: float = 0.0
    off: tuple[float, float, float] = (0.0, 0.0, 0.0)


def count(batch: Any, num_samples: int, divisor: Divisor) -> int | None:
    """Return what a loss over ``batch`` divides by; None where labels are no classes."""
    if divisor == "samples":
        return num_samples
    fields = batch if isinstance(batch, Mapping) else {}
    labels = fields.get("shift_labels", fields.get("labels"))
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    if divisor == "shifted labels" and "shift_labels" not in fields:
        labels = labels[..., 1:]
    return int((labels != IGNORED).sum())


def divisor_of(
    trainer: Any,
    batch: Any,
    num_samples: int,
    num_items: Any,
    *,
    is_scaled: bool,
    meets: bool,
) -> Divisor | None:
    """Return what the loss divides by. Collective: all ranks come to the same result.

    ``"items"``: the ``num_items_in_batch`` of all ranks, as Trainer takes for granted.
    The others: those in the forward alone, as the losses of many models for classification do,
    which accept ``num_items_in_batch`` and leave it unread. A few forwards without gradient show
    it, in evaluation mode, on the model beneath DDP; where this batch fits several, the kind of
    the model does. None: no rank has a loss other than 0 in this batch.

    Where Trainer takes no number of items for granted, a loss that fits none is one over samples,
    as of a model that draws noise.

    Args:
        trainer: computes it.
        batch: this rank's first one.
        num_samples: in it; 0 for a stand-in.
        num_items: of all ranks.
        is_scaled: whether Trainer takes for granted that it divides by them.
        meets: whether ranks meet in the loss, and have to compute as many.

    Raises:
        ValueError: it divides by none of them.
    """
    if not is_scaled and count(batch, num_samples, "labels") is None:
        return "samples"  # there is nothing else that it may be a mean over
    losses = LossCalls(trainer)
    found = _look(losses, batch, num_samples, num_items) if num_samples else Evidence()
    while meets and losses.num_calls < _MOST_LOSSES:
        losses(batch, num_items)
    loss, listens, *distances = _summed(trainer, found)
    if not loss:
        return None
    if listens > _SAME * loss:
        _look_for_a_rest(trainer, num_items, 1 - 2 * listens / loss)
        return "samples" if num_items is None else "items"
    off = dict(zip(_OWN, distances, strict=True))
    least = min(distances)
    if least > _tolerance(trainer) * loss:
        if not is_scaled:
            return "samples"
        raise invalid(
            f"{type(trainer).__name__}(model=...)",
            "have a loss that is divided by `num_items_in_batch`, by its own targets or by its "
            "own samples",
            "another one",
            "Set `model.accepts_loss_kwargs = False` before the trainer is made, and "
            '`balancing={"unit": function}`, which returns what the loss of a batch divides by.',
        )
    fitting = [name for name in _OWN if off[name] <= least + _ROUNDING * loss]
    usual = _usual(trainer, batch, is_scaled=is_scaled)
    return usual if usual in fitting else fitting[0]


def _look_for_a_rest(trainer: Any, num_items: Any, rest: float) -> None:
    """Warn if a part of the loss, such as a router's, is no sum over the items."""
    if num_items is None or abs(rest) <= _tolerance(trainer):
        return
    warn(
        f"{type(trainer).__name__}(model=...): a part of the loss ({abs(rest):.0%} of it) is not "
        f"divided by `num_items_in_batch`. It counts each rank's mean alike, as in plain Trainer, "
        f"so its gradient depends on the sizes. For an exact one, divide all of the loss by "
        f'`num_items_in_batch`, or keep equal sizes: `balancing={{"policy": "equal"}}`.'
    )


def _usual(trainer: Any, batch: Any, *, is_scaled: bool) -> Divisor:
    """Return what the kind of the model, and of its labels, let expect."""
    shifts = shifting(trainer.accelerator.unwrap_model(trainer.model_wrapped))
    if count(batch, 0, "labels") is None or (shifts is None and not is_scaled):
        return "samples"
    return "shifted labels" if shifts or trainer._loss_shifts_labels else "labels"


def _look(loss_of: LossCalls, batch: Any, num_samples: int, num_items: Any) -> Evidence:
    """Compute the loss of a batch for two numbers of items, and of two pieces of it."""
    given = [None, None] if num_items is None else [num_items, 2 * num_items]
    once, twice = (loss_of(batch, items) for items in given)
    if not (once and math.isfinite(once) and math.isfinite(twice)):
        return Evidence()
    if abs(once - twice) > _SAME * abs(once):
        return Evidence(abs(once), abs(once - twice))
    whole = loss_of(batch, None)
    pieces = pieces_of(batch, num_samples)
    if pieces is None:
        return Evidence(abs(whole))
    each = [pieces.cut(i, i + 1) for i in range(pieces.num)]
    counts = [[count(piece, 1, divisor) for piece in each] for divisor in _OWN]
    if pieces.num_samples is None:
        counts[-1] = [None] * pieces.num
    cut = _cut(counts[0], pieces.num)
    losses = [loss_of(pieces.cut(*ends), None) for ends in ((0, cut), (cut, pieces.num))]
    by_labels, by_shifted, by_samples = (_distance(whole, losses, one, cut) for one in counts)
    return Evidence(abs(whole), 0.0, (by_labels, by_shifted, by_samples))


def _summed(trainer: Any, found: Evidence) -> list[float]:
    row = torch.tensor([found.loss, found.listens, *found.off], device=trainer.args.device)
    total: list[float] = trainer.accelerator.reduce(row, reduction="sum").tolist()
    return total


def _cut(counts: Sequence[int | None], num_pieces: int) -> int:
    """Return where shares of the targets and of the samples differ most."""
    known = [each or 0 for each in counts]
    total = sum(known) or 1
    return max(
        range(1, num_pieces),
        key=lambda cut: (abs(sum(known[:cut]) / total - cut / num_pieces), -cut),
    )


def _distance(
    whole: float, losses: Sequence[float], counts: Sequence[int | None], cut: int
) -> float:
    """Return how far two pieces' losses, each by its share, are from the whole one."""
    known = [each for each in counts if each is not None]
    if len(known) < len(counts):
        return math.inf
    shares = sum(known[:cut]), sum(known[cut:])
    parts = [loss * share for loss, share in zip(losses, shares, strict=True) if share]
    off = abs(whole - sum(parts) / sum(shares)) if parts else math.inf
    return off if math.isfinite(off) else abs(whole)  # a mean over no targets is no number


def _tolerance(trainer: Any) -> float:
    is_short = trainer.args.bf16 or trainer.args.fp16
    kinds = {parameter.dtype for parameter in trainer.model.parameters()}
    return 2e-2 if is_short or kinds & {torch.bfloat16, torch.float16} else _SAME


def weights_of(trainer: Any, step: Step, divisor: Divisor) -> list[Any]:
    """Return what the loss of each of this rank's forwards, divided by its own, is multiplied by.

    That is its share of what the step has over all ranks, times their number: DDP divides by it.
    A forward with nothing in it weighs the number 0, as its mean is no number. Collective.
    """
    parts, accelerator = step.micro_batches, trainer.accelerator
    own = [
        (count(part.batch, part.num_samples, divisor) or 0) if part.num_samples else 0
        for part in parts
    ]
    total: Any = step.global_num_samples / accelerator.num_processes
    if divisor != "samples":
        device = trainer.args.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = accelerator.reduce(torch.tensor(sum(own), device=device, dtype=dtype), "mean")
    return [each / total if each else 0 for each in own]


@contextmanager
def weighted(trainer: Any, weight: Any) -> Iterator[None]:
    """Have the loss of a forward in the block multiplied, whatever computes it.

    On the object alone: a class below may compute a loss of its own.

    Args:
        trainer: computes it.
        weight: None leaves the loss as it is.

    Raises:
        ValueError: it was not computed by ``compute_loss``, of which alone the weight is known.
    """
    before = vars(trainer).get("compute_loss")
    compute = trainer.compute_loss
    is_computed = False

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_computed
        is_computed = True
        found = compute(*args, **kwargs)
        if weight is None:
            return found
        loss, *more = found if isinstance(found, tuple) else (found,)
        loss = loss * torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)
        return (loss, *more) if more else loss

    trainer.compute_loss = compute_loss
    try:
        yield
    finally:
        if before is None:
            del trainer.compute_loss
        else:
            trainer.compute_loss = before
    if not is_computed:
        raise invalid(
            f"{type(trainer).__name__}.training_step(...)",
            "get its loss from `self.compute_loss`, where it is weighted",
            "one that has another",
            "Move what computes the loss into `compute_loss`.",
        )
