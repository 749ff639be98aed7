"""`Trainer`: its training loader balanced, its own weighting by targets left to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from .._warning import warn
from ..exceptions import invalid
from ..torch import Balancer
from ..torch._data._step import Step
from ..torch._exchange._crew import is_off
from ..torch._model._units import shifting
from ._accelerate import gathers_rows
from ._checks import check_accelerator, check_batches, check_model
from ._gathering_loss import loss_alone, meet_before_forwards, meets, num_missing, without_gradient
from ._micro_batches import BELOW, IGNORED, Portion, masked, pieces_of, portions, with_own_targets
from ._training_data import TrainingData, UnwrappedLoader

Divisor = Literal["items", "labels", "shifted labels", "samples"]

_OWN: tuple[Divisor, ...] = ("labels", "shifted labels", "samples")
_ROUNDING = 1e-6  # of losses, relative; less than that shows nothing
_SAME = 1e-4
_MOST_LOSSES = 5  # that are computed to find out
_NOTHING = (0.0,) * 5  # what a batch says of which nothing is known


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
    loss, listens, *distances = _evidence(trainer, batch, num_samples, num_items, meets=meets)
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


def _evidence(
    trainer: Any, batch: Any, num_samples: int, num_items: Any, *, meets: bool
) -> list[float]:
    """Return the sums over ranks of what ``_look`` finds in their batches. Collective."""
    num_calls = 0

    def loss_of(batch: Any, num_items: Any) -> float:
        nonlocal num_calls
        num_calls += 1
        return loss_alone(trainer, batch, num_items)

    found = _look(loss_of, batch, num_samples, num_items) if num_samples else _NOTHING
    while meets and num_calls < _MOST_LOSSES:
        loss_of(batch, num_items)
    row = torch.tensor(found, device=trainer.args.device)
    total: list[float] = trainer.accelerator.reduce(row, reduction="sum").tolist()
    return total


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


def _look(
    loss_of: Callable[[Any, Any], float], batch: Any, num_samples: int, num_items: Any
) -> tuple[float, ...]:
    r"""Compute the loss of a batch for two numbers of items, and of two pieces of it.

    The loss $L$ of the whole batch is compared with $\sum_i s_i L_i$ of the two, where $s_i$ are
    shares of the samples or of the targets. Return the loss, how far it changes with twice as many
    items, and the distances of the sums by labels, shifted labels and samples; zeros where the
    batch says nothing.
    """
    given = [None, None] if num_items is None else [num_items, 2 * num_items]
    once, twice = (loss_of(batch, items) for items in given)
    if not (once and math.isfinite(once) and math.isfinite(twice)):
        return _NOTHING
    if abs(once - twice) > _SAME * abs(once):
        return abs(once), abs(once - twice), 0.0, 0.0, 0.0
    whole = loss_of(batch, None)
    pieces = pieces_of(batch, num_samples)
    if pieces is None:
        return abs(whole), 0.0, 0.0, 0.0, 0.0
    each = [pieces.cut(i, i + 1) for i in range(pieces.num)]
    counts = [[count(piece, 1, divisor) for piece in each] for divisor in _OWN]
    if not pieces.are_samples:
        counts[-1] = [None] * pieces.num
    cut = _cut(counts[0], pieces.num)
    losses = [loss_of(pieces.cut(*ends), None) for ends in ((0, cut), (cut, pieces.num))]
    return abs(whole), 0.0, *(_distance(whole, losses, one, cut) for one in counts)


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


_Trainer: Any = object  # stands for `transformers.Trainer`, which is not imported


class BalancedMixin(_Trainer):  # type: ignore[misc]  # of any kind, to mypy
    """Makes a `Trainer` share out its global batches by the speeds of the ranks.

    Usage:
        class BalancedTrainer(BalancedMixin, Trainer):
            pass

        trainer = BalancedTrainer(model=model, args=args, train_dataset=dataset)
        trainer.train()

    Every optimizer step trains on the same samples as in a plain `Trainer` with as many processes.
    Ranks differ in how many of them they compute. With ``gradient_accumulation_steps`` the batches
    of all ranks in a step are shared out together, in forwards of at most
    ``per_device_train_batch_size``: a fast rank makes more forwards than a slow one.

    `Trainer` divides the loss by the ``num_items_in_batch`` of all ranks if the model accepts loss
    keywords or there is a ``compute_loss_func``. Its gradient is then exact for any split, and
    evenstep adds no weights. Many models for classification ignore that number. evenstep finds this
    out in the first step, and weights such a loss by what it divides by: its samples, or its own
    targets. For models without loss keywords it finds out in the same way, and takes samples in
    doubt; or a ``unit`` in ``balancing`` says it.

    With ``TrainingArguments(train_sampling_strategy="batch_rebalance")``, plans go by the lengths
    that transformers finds, with the same samples in every step.

    Resuming from a checkpoint of `Trainer` continues at the next step, also within an epoch, with
    as many processes as before.

    Args:
        args: arguments for `Trainer`, as are the keywords other than ``balancing``.
        balancing: keywords for ``evenstep.torch.Balancer``: ``policy``, ``bounds``, ``runtime``,
            ``unit`` (only for models without loss keywords), and ``cost``, whose columns need not
            be ones that the model takes.

    Attributes:
        balancer: the balancer of the current or the last training; None before.

    Raises:
        ValueError: `Trainer` is set up for something that is not balanced; the message says what
            to do.
    """

    def __init__(
        self, *args: Any, balancing: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._balancing = dict(balancing or {})
        _check_options(self._balancing)
        check_accelerator(self.accelerator)
        _check_arguments(self.args, scaled=self._is_scaled())
        self._data: TrainingData | None = None
        self._awaits_data = False  # whether Trainer has yet to ask for that of a training
        self.balancer: Balancer | None = None
        self._has_begun = False
        self._divisor: Divisor | None = None
        self._per_sample = 0.0  # of the step: what a sample weighs in a mean over samples
        self._stands_in = False  # whether a forward is under way that has no sample
        self._meets = False  # whether ranks wait for each other where a loss is computed

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer` does, and end the balanced run with it."""
        self._awaits_data = True
        try:
            if is_off():
                return super().train(*args, **kwargs)
            with gathers_rows(
                self.accelerator,
                has_none=lambda: self._stands_in,
                leaves_out=lambda: self._meets,
            ):
                return super().train(*args, **kwargs)
        finally:
            self._awaits_data = False
            if self.balancer is not None:
                self.balancer.close()

    def get_train_dataloader(self) -> Any:
        """Return the balanced training loader to ``train``, and Trainer's own to all others."""
        prepared = super().get_train_dataloader()
        if not self._awaits_data:
            return prepared
        self._awaits_data = False
        if is_off():
            self.balancer = Balancer(**self._balancing)
            self.balancer.prepare()  # which compares the ranks
            return prepared
        if self._is_scaled() and self._balancing.get("unit", "samples") != "samples":
            raise invalid(
                f"{type(self).__name__}(balancing=...)",
                "leave out 'unit', as Trainer divides this model's loss by its targets itself",
                repr(self._balancing["unit"]),
                "If not, set `model.accepts_loss_kwargs = False` before the trainer is made.",
            )
        check_batches(self, UnwrappedLoader(prepared, self.accelerator).sampler)
        if self._data is not None:
            self._data.close()
        self._data = TrainingData(
            prepared,
            self.accelerator,
            self.train_dataset,  # with the columns that the model does not take
            num_accumulated=self.args.gradient_accumulation_steps,
            loss_reduction="sum" if self._is_scaled() else "mean",
            options=self._balancing,
        )
        self.balancer = self._data.balancer
        self._has_begun = False
        self._divisor = None
        self._meets = self._stands_in = False
        return self._data

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> Any:
        """Return the next step in ``num_batches`` portions, and its targets over all ranks."""
        if self._data is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if not self._has_begun:
            check_model(self.model_wrapped)
            self._data.balancer.prepare(self.model_wrapped)
        step = self._data.next_step(
            epoch_iterator, self.state.global_step, skips=not self.args.ignore_data_skip
        )
        if step is None:
            return [], None
        batches = [masked(part) for part in step.micro_batches]
        counted = map(with_own_targets, step.micro_batches)
        _, num_items = super().get_batch_samples(counted, len(batches), device)
        if not self._has_begun and meets(self, step.micro_batches[0].batch, num_items):
            self._meets = True
            self._data.meet_in_forwards()
        finds_out = self._is_scaled() or "unit" not in self._balancing
        if finds_out and self._divisor is None:
            self._divisor = self._found_divisor(step, num_items)
        weights = None
        if self._divides_by() != "items":
            # A mean over a stand-in is a number only with its targets; its weight is 0.
            batches = [part.batch for part in step.micro_batches]
            weights = weights_of(self, step, self._divisor or "samples")
        self._per_sample = self.accelerator.num_processes / step.global_num_samples
        if num_batches > 1 or self._meets:
            meet_before_forwards(self, equal_forwards=step.equal_forwards)
        self._has_begun = True
        main_input = getattr(self.model, "main_input_name", "input_ids")
        handed_out: list[Any] = portions(
            step,
            batches,
            num_batches,
            main_input=main_input,
            weights=weights,
            num_extra=num_missing(self, len(batches)) if self._meets else 0,
        )
        return handed_out, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Make the forwards and backwards of a portion; return its part of the step's loss."""
        if not isinstance(inputs, Portion):
            if self.is_in_train and not is_off():
                raise invalid(
                    f"{type(self).__name__}.get_train_dataloader()",
                    "be left to `BalancedMixin`, as `get_batch_samples()` is, to share batches out",
                    "one that comes before it, or batches from elsewhere",
                    BELOW,
                )
            return super().training_step(model, inputs, num_items_in_batch)
        total = torch.zeros((), device=self.args.device)
        divisor, is_scaled = self._divides_by(), self._is_scaled()
        given = num_items_in_batch if divisor == "items" else None
        if divisor != "items":
            # What Trainer divides by; every forward has its weight in the whole step already.
            self.current_gradient_accumulation_steps = 1
        for forward in inputs.forwards():
            self._stands_in = not forward.num_samples
            if forward.is_extra:
                without_gradient(self, forward.batch, given)
                continue
            weight = forward.weight
            # Without a rule of Trainer's the balancer weighs, by samples or the unit it was given.
            given_already = 1 if is_scaled else forward.num_samples * self._per_sample
            is_left = divisor == "items" or not given_already
            factor = None if is_left else weight / given_already
            at_loss = nullcontext() if divisor is None else weighted(self, factor)
            with nullcontext() if forward.is_last else self.accelerator.no_sync(model), at_loss:
                loss = super().training_step(model, forward.batch, given)
            # A mean over nothing is no number, and weighs 0; a weight in a tensor is none of 0.
            if torch.is_tensor(weight) or weight:
                total = total + loss * given_already
        self._stands_in = False
        return total

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Have `Trainer` end with the mean of all ranks since the last log, not with its own."""
        if self._data is not None:
            self._tr_loss: Any = self.accelerator.reduce(self._tr_loss, reduction="mean")
        return super()._finalize_training(*args, **kwargs)

    def _found_divisor(self, step: Step, num_items: Any) -> Divisor | None:
        """Look at the first batch. Collective."""
        first, is_scaled = step.micro_batches[0], self._is_scaled()
        found = divisor_of(
            self,
            first.batch,
            first.num_samples,
            num_items if is_scaled else None,
            is_scaled=is_scaled,
            meets=self._meets or getattr(self.accelerator, "is_fsdp2", False),
        )
        is_accumulated = self.args.gradient_accumulation_steps > 1
        if is_scaled and found not in (None, "items") and is_accumulated:
            warn(
                f"The loss of {type(self.model).__name__} is a mean over a batch's own {found}, "
                f"but Trainer expects it to be divided by `num_items_in_batch`, and would add up "
                f"the {self.args.gradient_accumulation_steps} accumulated means. Here the gradient "
                f"is that of their mean, as with `model.accepts_loss_kwargs = False`."
            )
        return found

    def _divides_by(self) -> Divisor | None:
        """Return what the loss divides by; None where the balancer's weight is right."""
        if self._is_scaled():
            return self._divisor or "items"
        return None if self._divisor == "samples" else self._divisor

    def _is_scaled(self) -> bool:
        """Return whether the loss is divided by the whole step's targets: Trainer's own rule."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        return bool(self.model_accepts_loss_kwargs) or self.compute_loss_func is not None


def _check_options(options: Mapping[str, Any]) -> None:
    for name, remedy in {
        "global_batch_size": "Set `per_device_train_batch_size` and the accumulation steps.",
        "loss_reduction": "Set Trainer's `loss_is_scaled_for_ga` where its rule is wrong.",
    }.items():
        if name in options:
            raise invalid("BalancedMixin(balancing=...)", f"leave out {name!r}", "it", remedy)
    if getattr(options.get("runtime"), "process_group", None) is not None:
        rule, remedy = "leave out `Runtime(process_group=...)`", "Trainer trains on all ranks."
        raise invalid("BalancedMixin(balancing=...)", rule, "it", remedy)


def _check_arguments(args: Any, *, scaled: bool) -> None:
    if args.auto_find_batch_size:
        raise invalid(
            "TrainingArguments(auto_find_batch_size=...)",
            "be False, as it changes the global batch",
            True,
            "Set `per_device_train_batch_size`; memory bounds each rank's part of it.",
        )
    if args.n_gpu > 1:
        raise invalid(
            "TrainingArguments(...)",
            "have one device to a process",
            f"{args.n_gpu} devices in one process",
            "Start it with `torchrun --nproc-per-node` or `accelerate launch`.",
        )
    if scaled and args.world_size > 1 and not args.average_tokens_across_devices:
        raise invalid(
            "TrainingArguments(average_tokens_across_devices=...)",
            "be True: a mean over each rank's own targets depends on the split",
            False,
            "Leave it out.",
        )
