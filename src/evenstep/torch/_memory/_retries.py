"""Run a step's micro-batches, find by trial what fits, and run smaller parts where it did not."""

from __future__ import annotations

import functools
import gc
import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ...exceptions import invalid
from ...solve._apportion import cut, cut_by_size
from .._data._protocols import MicroBatch
from .._model._models import PreparedModels
from .._step._tracker import StepTracker
from ._layout import Layout, kept

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "status_alloc_failed",  # of cuBLAS and cuDNN, which find no room for what they work with
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory, the device's or the host's, ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)


def attempt(call: Callable[[], object], *, survives: bool = True) -> Exception | None:
    """Make ``call``; return the error if memory ran out, and have its frames hold nothing.

    Args:
        call: may run out of memory.
        survives: whether it may be made again; if not, the error is raised as any other.
    """
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if not (survives and is_out_of_memory(error)):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
        return error.with_traceback(None)
    return None


def free_memory() -> None:
    """Give back what the failed forward held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


Closure = Callable[[Any], torch.Tensor]
"""The user's forward: from a micro-batch to its loss."""

_MARGIN = 0.9  # of what was found: fragmentation, longer sequences, an evaluation in between


def probe(
    part: MicroBatch,
    closure: Closure,
    through: Callable[[torch.Tensor], Any],
    *,
    most: int,
    smallest: int,
    layout: Layout,
    models: PreparedModels,
) -> int | None:
    """Return the most samples that one forward should get, or None if ``most`` of them fit.

    Runs forward and backward at doubling sizes, made by repeating the samples at hand, until one
    does not fit; then halves the interval to within a tenth. A tenth is left free. Gradients are
    thrown away; buffers (running statistics) and the random state are put back. Other ranks are
    not needed for any of it: nothing is synchronised.

    Right where memory grows with the number of samples, whatever is in them. Wrong where it
    depends on their lengths: probe on the longest, or set `Bounds(max=...)`. Optimizer state that
    is made in the first step comes on top: what then runs out is cut by ``Retries``.

    Args:
        part: a micro-batch of real samples.
        closure: from a batch to its loss.
        through: runs the backward of a loss.
        most: largest size worth knowing, at least 1.
        smallest: samples that one forward needs at least.
        layout: finds out what of a batch has one entry per sample.
        models: whose gradients and buffers are put back, and whose backwards do not synchronise.

    Raises:
        RuntimeError: not even ``smallest`` samples fit.
    """
    held = max(part.num_samples, 1)

    def fits(size: int) -> bool:
        def forward_and_backward() -> None:
            with models.no_sync():
                through(closure(layout.repeat(part.batch, held, size)))

        failed = attempt(forward_and_backward)
        if failed is not None:
            models.forget_forward()
        free_memory()
        return failed is None

    with kept(models.modules()):
        good = _largest(fits, start=max(min(held, most), smallest), most=most)
    if good == most:
        return None
    if good < smallest:
        raise RuntimeError(
            f"Not even {smallest} samples fit into this worker's memory. Use a smaller model, "
            f"activation checkpointing, or leave this worker out."
        )
    return max(int(_MARGIN * good), smallest)


def _largest(fits: Callable[[int], bool], *, start: int, most: int) -> int:
    """Return a size that fits and is within a tenth of the largest; 0 if none does."""
    good, bad, size = 0, None, start
    while bad is None and good < most:
        if fits(size):
            good, size = size, min(2 * size, most)
        else:
            bad = size
    while bad is not None and bad - good > max(1, good // 10):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


class Retries:
    r"""Runs forward and backward of every micro-batch, and survives running out of memory.

    What did not fit is cut into smaller parts and run again: the step keeps its samples, and the
    weights of the parts add up to the same gradient. The gradient is put back to what it was:
    untouched if memory ran out in the forward, else from nothing, where the step began without
    gradients (``zero_grad(set_to_none=True)``, torch's default).

    A backward that synchronises cannot be taken back once others have had a part of it. So a
    forward larger than any that went well on this rank is not the one to synchronise: a stand-in
    of weight 0 does that after it. A size that went well before goes straight, and costs nothing
    more than a plain loop; if that one fails past its forward, nothing can help, and the error
    says so.

    Right for plain modules and DDP. Where forwards are collectives, as with FSDP2, one rank cannot
    repeat them: the error passes. Random numbers are drawn anew when parts run again. Buffers that
    a forward changes are not put back: the running statistics of BatchNorm count what broke off and
    what ran again, and stand-ins, once more.

    Args:
        models: those of the run.
        steps: are notified of forwards and limits.
        layout: finds out what of a batch has one entry per sample; asked once, when it is needed.
        loss_reduction: what a loss does over the samples of a forward, ``"mean"`` or ``"sum"``.
        smallest: gives the samples that one forward needs at least, positive.
        probe_up_to: find by trial, before the first forward, which size up to this one fits; None
            does without.

    Attributes:
        limit: most samples in one forward, or the most of what ``Cost(max_size=...)`` counts;
            None as long as none failed.
        probes: whether a trial is still to come.
    """

    def __init__(
        self,
        models: PreparedModels,
        steps: StepTracker,
        *,
        layout: Callable[[], Layout],
        loss_reduction: str = "mean",
        smallest: Callable[[], int] = lambda: 1,
        probe_up_to: int | None = None,
    ) -> None:
        self._models = models
        self._steps = steps
        self._layout = functools.cache(layout)
        self._sums = loss_reduction == "sum"
        self._least = smallest
        self._probe_up_to = probe_up_to
        self._smallest = 0
        self._went_well: set[int] = set()
        self.limit: int | None = None

    @property
    def probes(self) -> bool:
        return self._probe_up_to is not None

    def run(
        self,
        step: int,
        parts: Sequence[MicroBatch],
        closure: Closure,
        through: Callable[[torch.Tensor], Any],
    ) -> torch.Tensor:
        """Run all of a step and return the loss over its samples here, detached.

        Args:
            step: its number.
            parts: its micro-batches.
            closure: from a batch to its loss.
            through: runs the backward of a loss.

        Raises:
            RuntimeError: memory ran out where no smaller part would help, or where the gradient
                could not be put back.
        """
        if not self._smallest:  # not before the first step: then all models are there
            self._smallest = self._least()
        if self._probe_up_to is not None and parts[0].num_samples:
            self._probe(parts[0], closure, through, most=self._probe_up_to)
        fresh = all(parameter.grad is None for parameter in self._models.parameters())
        queue = self._cut(parts)
        losses: list[tuple[torch.Tensor, float]] = []
        while len(losses) < len(queue):
            part, is_last = queue[len(losses)], len(losses) == len(queue) - 1
            self._steps.begin_forward(step, part, is_last=is_last)
            error, loss, in_backward = self._attempt(part, closure, through, is_last=is_last)
            if error is None:
                assert loss is not None
                if part.size > max(self._went_well, default=0):
                    self._went_well.add(part.size)
                losses.append((loss, part.num_samples if part.units is None else part.units))
                continue
            again = in_backward and self._touched(fresh=fresh and not losses)
            self._check(error, part, fresh=fresh, again=again, is_last=is_last)
            self._lower(part.size)
            self._steps.ran_out_of_memory(self.limit or 1, again=again)
            if again:
                for parameter in self._models.parameters():
                    parameter.grad = None
                losses.clear()
                queue = self._cut(parts)
            else:
                queue[len(losses) :] = self._cut(queue[len(losses) :])
        return self._loss(losses)

    def _probe(
        self,
        part: MicroBatch,
        closure: Closure,
        through: Callable[[torch.Tensor], Any],
        *,
        most: int,
    ) -> None:
        if not self._models.can_run_again:
            raise invalid(
                "Bounds(max='probe')",
                "be used with plain modules and DDP",
                "a model whose forward is a collective, which no rank can try alone",
                "Give `Bounds(max=...)` a number.",
            )
        self._probe_up_to = None
        self._models.expect_forward()
        limit = probe(
            part,
            closure,
            through,
            most=most,
            smallest=self._smallest,
            layout=self._layout(),
            models=self._models,
        )
        if limit is not None:
            self.limit = limit
            self._steps.found_limit(limit)

    def _attempt(
        self,
        part: MicroBatch,
        closure: Closure,
        through: Callable[[torch.Tensor], Any],
        *,
        is_last: bool,
    ) -> tuple[Exception | None, torch.Tensor | None, bool]:
        """Return the lack of memory if there was one, the loss, and whether the backward ran."""
        losses: list[torch.Tensor] = []

        def forward_and_backward() -> None:
            with nullcontext() if is_last else self._models.no_sync():
                losses.append(closure(part.batch))
                through(losses[0])

        self._models.expect_forward()
        error = attempt(forward_and_backward, survives=self._models.can_run_again)
        in_backward = bool(losses)
        if error is None:
            self._models.end_forward()
            return None, losses[0].detach(), in_backward
        losses.clear()
        free_memory()
        self._models.forget_forward()
        return error, None, in_backward

    def _loss(self, losses: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
        """Return the loss over all samples; of a stand-in alone, that of the stand-in."""
        counted = [pair for pair in losses if pair[1]]
        if not counted:
            return losses[0][0]
        if self._sums:
            return torch.stack([loss for loss, _ in counted]).sum()
        count = math.fsum(size for _, size in counted)
        return torch.stack([size / count * loss for loss, size in counted]).sum()

    def _touched(self, *, fresh: bool) -> bool:
        """Return whether a backward that failed may have changed a gradient."""
        if not fresh:
            return True
        return any(parameter.grad is not None for parameter in self._models.parameters())

    def _check(
        self, error: Exception, part: MicroBatch, *, fresh: bool, again: bool, is_last: bool
    ) -> None:
        """Raise where running again would not help, or not be right."""
        size = part.num_samples
        remedy = f"Bounds(max={size // 2})"
        if part.sizes is not None:
            remedy = f"Cost(max_size={part.size // 2})"
        if size <= self._smallest:
            raise RuntimeError(
                f"A forward of {size} samples ran out of memory, and no smaller one is possible. "
                f"Use a smaller model, activation checkpointing, or leave this worker out."
            ) from error
        if is_last and (again or self._models.expects_reduction):
            raise RuntimeError(
                f"Memory ran out past a forward of {size} samples, a size that had gone well "
                f"before: DDP reduces its backward with the other workers, so it cannot be taken "
                f"back. Set "
                f"`{remedy}`, or restart from the last checkpoint."
            ) from error
        if again and not fresh:
            raise RuntimeError(
                "Memory ran out in a backward after gradients of earlier steps had been "
                "accumulated, which cannot be taken back. Clear them before every step with "
                f"`optimizer.zero_grad(set_to_none=True)`, or set `{remedy}`."
            ) from error

    def _lower(self, failed: int) -> None:
        self._went_well = {size for size in self._went_well if size < failed}
        self.limit = max(failed // 2, self._smallest, *self._went_well)

    def _cut(self, parts: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the parts within the limit, the last of them safe to synchronise in."""
        pieces = [piece for part in parts for piece in self._pieces(part)]
        last = pieces[-1]
        is_new = last.size > max(self._went_well, default=0)
        if self._models.synchronise and is_new and last.num_samples > self._smallest:
            cuts = self._smallest, last.num_samples - self._smallest
            stand_in, _ = self._layout().split(last.batch, last.num_samples, cuts)
            keys = None if last.keys is None else last.keys[: cuts[0]]
            pieces.append(last.cut(stand_in, 0, sizes=last.sizes, keys=keys))
        return pieces

    def _pieces(self, part: MicroBatch) -> list[MicroBatch]:
        if part.size <= (self.limit or part.size):
            return [part]
        if part.sizes is None:
            counts = cut(part.num_samples, self.limit)
        else:
            counts = cut_by_size(part.sizes.tolist(), self.limit or 0, self._smallest)
        if len(counts) == 1:
            return [part]
        batches = self._layout().split(part.batch, part.num_samples, counts)
        firsts = [sum(counts[:number]) for number in range(len(counts))]
        return [
            part.cut(
                batch,
                count,
                sizes=None if part.sizes is None else part.sizes[first : first + count],
                keys=None if part.keys is None else part.keys[first : first + count],
            )
            for batch, count, first in zip(batches, counts, firsts, strict=True)
        ]
