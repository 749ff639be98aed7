"""What fits into memory: micro-batches run, tried, and cut where a forward did not fit.

A batch is cut by what of it has one entry for each sample; a trial leaves no trace.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .._nested_tensors import rebuild
from .._private_torch import buffers_of
from ..exceptions import invalid
from ..solve._allocate import cut, cut_by_size
from ._data._protocols import MicroBatch
from ._data.fetch._loader_workers import pinning, same_chance
from ._data.loaders._stream import StreamLoader
from ._model._models import PreparedModels
from ._step._tracker import StepTracker


@contextmanager
def kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put gradients, buffers and the random state back at the end; inside, there are no gradients.

    The random state is that of torch's default generators, numpy's and Python's own.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    grads = [parameter.grad for parameter in parameters]
    buffers = list(_buffers(modules))
    values = [buffer.clone() for _, _, buffer in buffers]
    try:
        with same_chance({p.device.index for p in parameters if p.device.type == "cuda"}):
            for parameter in parameters:
                parameter.grad = None
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        with torch.no_grad():
            for (layer, name, buffer), value in zip(buffers, values, strict=True):
                buffers_of(layer)[name] = buffer  # a forward may have put another in its place
                buffer.copy_(value)


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield every buffer with the layer that holds it and its name there."""
    for module in modules:
        for layer in module.modules():
            for name, buffer in buffers_of(layer).items():
                if buffer is not None:
                    yield layer, name, buffer


Path = tuple[Any, ...]
"""Keys, places and field names that lead to a member of a batch."""

_REMEDY = "Have `collate_fn` lay samples along the first dimension, or set `Bounds(max=...)`."


class Layout:
    """Cuts batches by their samples: it finds out which members have one entry per sample.

    Two batches that differ in size alone are compared: what has as many entries as samples in both
    has one for each. A length by itself says nothing: a batch of 64 may hold 64 class weights.

    Right for what collates samples along the first dimension: tensors, and lists of one entry per
    sample, in dicts, lists, tuples, named tuples and dataclasses.

    Args:
        collated: returns a batch of so many samples, as the loader's ``collate_fn`` makes them.
    """

    def __init__(self, collated: Callable[[int], Any]) -> None:
        few, more = (
            {path: _length(member) for path, member in _members(collated(size), ())}
            for size in (2, 3)
        )
        self._known = {path: few[path] == 2 and more[path] == 3 for path in few.keys() & more}

    def split(self, batch: Any, num_samples: int, sizes: Sequence[int]) -> list[Any]:
        """Return ``batch`` in parts of ``sizes`` samples, one after the other.

        What has no entry per sample is passed to every part. Tensors are views: nothing is copied.

        Args:
            batch: a collated batch.
            num_samples: how many samples it holds.
            sizes: of the parts, positive, adding up to ``num_samples``.

        Raises:
            ValueError: nothing in the batch has one entry per sample, or that is unclear.
        """
        parts, first = [], 0
        for size in sizes:
            parts.append(self._selected(batch, num_samples, slice(first, first + size)))
            first += size
        return parts

    def repeat(self, batch: Any, num_samples: int, wanted: int) -> Any:
        """Return a batch of ``wanted`` samples: those of ``batch``, over and over.

        Raises:
            ValueError: as for ``split``.
        """
        rows = [row % num_samples for row in range(wanted)]
        return self._selected(batch, num_samples, rows)

    def per_sample(self, batch: Any, num_samples: int) -> list[Any]:
        """Return the outermost members of ``batch`` that have one entry per sample.

        Raises:
            ValueError: there is none, or one for which that is unclear.
        """
        found: list[Any] = []
        done: list[Path] = []
        for path, item in _members(batch, ()):
            if any(path[: len(outer)] == outer for outer in done):
                continue
            length = _length(item)
            known = self._known.get(path, None if length == num_samples else False)
            if known is None or (known and length != num_samples):
                raise _refused(num_samples, f"`{_named(path)}` with {length} entries")
            if known:
                found.append(item)
                done.append(path)
        if not found:
            raise _refused(num_samples, f"a {type(batch).__name__} without any")
        return found

    def _selected(self, batch: Any, num_samples: int, rows: slice | list[int]) -> Any:
        chosen = {id(item) for item in self.per_sample(batch, num_samples)}

        def visit(item: Any) -> Any:
            return _take(item, rows) if id(item) in chosen else rebuild(item, visit)

        return visit(batch)


def _take(item: Any, rows: slice | list[int]) -> Any:
    if isinstance(item, torch.Tensor) or isinstance(rows, slice):
        return item[rows]
    return type(item)([item[row] for row in rows])


def layout_by(loader: Any, prepared: Any) -> Callable[[], Layout]:
    """Return what finds out the layout of the loader's batches, from one sample over and over.

    Fetched as in training, in a worker process where there are any, and under random states that
    are put back.

    Args:
        loader: the user's own.
        prepared: what ``prepare`` made of it.
    """

    def find() -> Layout:
        with same_chance():
            if isinstance(prepared, StreamLoader):
                return Layout(prepared.repeated)
            return Layout(_repeating(loader))

    return find


def _repeating(loader: Any) -> Callable[[int], Any]:
    """Return what makes a batch of the data set's first sample, over and over.

    Fetched as in training: by a worker process, set up as the user's are, where there are any.
    The sampler is not asked, and no generator that training draws from is drawn from.
    """
    stock = DataLoader(
        loader.dataset,
        sampler=range(1),
        num_workers=min(loader.num_workers, 1),
        collate_fn=_as_they_are,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    ((sample,),) = stock
    batch_of = pinning(loader, loader.collate_fn, warns=False)
    # Each time a copy, as a `collate_fn` may change what it is given.
    return lambda size: batch_of([copy.deepcopy(sample) for _ in range(size)])


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _members(item: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield ``item`` and all that it holds, outer ones first."""
    yield path, item
    pairs: Any = ()
    if isinstance(item, Mapping):
        pairs = item.items()
    elif isinstance(item, (list, tuple)):
        pairs = enumerate(item)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        pairs = [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    for key, member in pairs:
        yield from _members(member, (*path, key))


def _length(item: Any) -> int | None:
    """Return the entries of what may have one per sample; None for all else."""
    if isinstance(item, torch.Tensor):
        return len(item) if item.dim() else None
    is_list = isinstance(item, (list, tuple)) and not hasattr(item, "_fields")
    return len(item) if is_list else None


def _named(path: Path) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _refused(num_samples: int, got: str) -> ValueError:
    rule = (
        f"get batches that can be cut: tensors or lists with one entry for each of the "
        f"{num_samples} samples"
    )
    return invalid("Step.backward(...)", rule, got, _REMEDY)


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
