"""Accelerate: what `prepare` returned, balanced, under Accelerate's own bookkeeping.

Rows of different numbers are gathered from all ranks as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from .._warning import warn
from ..exceptions import invalid
from ..torch import BalancedLoader, Balancer
from ..torch._data.loaders._base import AbstractLoader
from ._checks import check_accelerator, check_model
from ._training_data import UnwrappedLoader, set_epoch


def balance(
    accelerator: Any,
    *parts: Any,
    weighting: Literal["output", "loss"] = "output",
    **options: Any,
) -> Any:
    """Return the model and the training loader that ``accelerator.prepare`` returned, balanced.

    Usage:
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        model, loader = balance(accelerator, model, loader)

    The rest of the script stays: ``accelerator.accumulate``, ``backward``, ``clip_grad_norm_``,
    the optimizer and the scheduler. The loader hands out this rank's part of the same global
    batches, as many of them, in the same order; Accelerate's own sharding is undone first, so
    nothing is sharded twice, and ``even_batches`` repeats no sample. The gradient is weighted at
    the model's output: the division of ``accelerator.backward`` by the accumulation steps stays
    Accelerate's, and every batch of the loader has a plan of its own. Collective.

    Inside a loop over the loader, ``accelerator.gather`` and ``gather_for_metrics`` take tensors
    whose rows differ in number from rank to rank. A mean of the ranks' means would be wrong:
    ``loader.balancer.mean`` gives that over all samples.

    Args:
        accelerator: of one process, or of several with DDP.
        parts: models and one ``DataLoader``, as ``accelerator.prepare`` returned them.
        weighting: as for ``evenstep.torch.Balancer.prepare``.
        options: as for ``evenstep.torch.Balancer``, such as ``policy``, ``unit``, ``bounds`` and
            ``cost``.

    Returns:
        The parts in the order given, a single one by itself; the loader is an
        ``AcceleratedLoader``, and its ``balancer`` the run's.

    Raises:
        ValueError: a part or a setting of the accelerator cannot be balanced; the message says
            what to do instead.
    """
    check_accelerator(accelerator)
    for part in parts:
        check_model(part)
    places = _loader_places(parts)
    given = list(parts)
    for place in places:
        stock = UnwrappedLoader(parts[place], accelerator)
        given[place] = stock.rebuild()
        options = {"global_batch_size": stock.global_batch_size, "cost": stock.cost, **options}
    balancer = Balancer(**options)
    done = balancer.prepare(*given, weighting=weighting)
    made = [done] if len(parts) == 1 else list(done)
    for place in places:
        device = getattr(parts[place], "device", accelerator.device)  # None: as they are
        made[place] = AcceleratedLoader(made[place], balancer, accelerator, device=device)
        made[place]._checks_counts = (
            weighting == "output" and options.get("loss_reduction", "mean") == "mean"
        )
    return made[0] if len(made) == 1 else tuple(made)


def _loader_places(parts: tuple[Any, ...]) -> list[int]:
    """Return where the training loader stands among the parts, if there is one."""
    places = [index for index, part in enumerate(parts) if not isinstance(part, nn.Module)]
    if len(places) > 1:
        raise invalid(
            "balance(accelerator, ...)",
            "be given models and one training loader",
            f"{len(places)} things that are no model",
            "Leave optimizers, schedulers and loaders for evaluation as they are.",
        )
    return places


class AcceleratedLoader(AbstractLoader):
    """A balanced loader that Accelerate's gradient state knows of; made by ``balance``.

    Every iteration is one global batch, of which the rank gets its part on its device. In the
    last one of an epoch ``accelerator.accumulate`` makes an optimizer step, as it does with a
    loader of Accelerate's own. ``accelerator.register_for_checkpointing(loader)`` saves and loads
    the position, within an epoch too, on any number of processes.

    Args:
        loader: the balanced one.
        balancer: that prepared it.
        accelerator: whose gradient state is updated.
        device: where batches go; None leaves them where they are.

    Attributes:
        balancer: that prepared it: its ``mean``, ``batch_sizes``, ``weight`` and ``close``.
        iteration: epoch that the sampler is given at the next loop, counted by completed loops.
        end_of_dataloader: whether the batch handed out last is the epoch's last one.
        remainder: samples by which Accelerate would shorten what it gathered last: none here.
    """

    def __init__(
        self,
        loader: BalancedLoader,
        balancer: Balancer,
        accelerator: Any,
        *,
        device: torch.device | None,
    ) -> None:
        self._loader = loader
        self._accelerator = accelerator
        self._device = device
        self._in_last_batch = False
        self._checks_counts = False
        self.balancer = balancer
        self.iteration = 0
        self.end_of_dataloader = False
        self.remainder = 0

    @property
    def batch_sampler(self) -> Any:
        """Nothing: who asks wants to build another loader from this one, which would not share.

        Raises:
            ValueError: always.
        """
        raise invalid(
            "AcceleratedLoader.batch_sampler",
            "be left alone, as what is built from it would give every rank the same samples",
            "a request, such as that of `accelerator.skip_first_batches(loader)`",
            "Use `loader.skip(num_steps)` before the loop, or "
            "`accelerator.register_for_checkpointing(loader)`.",
        )

    def __len__(self) -> int:
        """Return the global batches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        from accelerate.utils import send_to_device  # type: ignore[import-untyped]

        state = self._accelerator.gradient_state
        self.end_of_dataloader = False
        set_epoch(self._loader, self.iteration)
        state._add_dataloader(self)
        try:
            with (
                gathers_rows(
                    self._accelerator, has_none=self._has_stand_in, saw_count=self._saw_count
                ),
                closing(iter(self._loader)) as batches,
            ):
                for batch in batches:
                    self.end_of_dataloader = self._in_last_batch = (
                        self._loader.num_handed_out == len(self._loader)
                    )
                    if self._device is None:
                        yield batch
                    else:
                        yield send_to_device(
                            batch, self._device, non_blocking=self._accelerator.non_blocking
                        )
            self.iteration += 1
        finally:
            self._in_last_batch = False
            state._remove_dataloader(self)

    def set_epoch(self, epoch: int) -> None:
        """Have the next loop be that of ``epoch``, for the sampler."""
        self.iteration = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, of plain values; the same on every rank.

        From inside the loop over an epoch's last batch, the next loop is that of the next epoch.
        """
        iteration = self.iteration + self._in_last_batch
        return {**self._loader.state_dict(), "iteration": iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next loop continue from ``state``, on every rank.

        Raises:
            ValueError: as for ``evenstep.torch.BalancedLoader.load_state_dict``.
        """
        self._loader.load_state_dict(state)
        self.iteration = state.get("iteration", 0)

    def close(self) -> None:
        """End the run on this rank: the balancer, the loader, its workers."""
        self.balancer.close()

    def _has_stand_in(self) -> bool:
        """Return whether the batch in hand weighs nothing; not in a loop for evaluation within."""
        is_in_hand = self._accelerator.gradient_state.active_dataloader is self
        return is_in_hand and self.balancer.num_samples == 0

    def _saw_count(self) -> None:
        """Warn once of a count that is gathered between a batch and its forward.

        As in Accelerate's recipe for accumulation, whose loss is divided by it.
        """
        if not self._checks_counts:
            return
        context = self._loader._context
        unused = context.session.steps.next_unused
        if unused is not None and unused < context.count.value:
            self._checks_counts = False
            warn(
                "A count was gathered from all ranks before the forward of its batch. If you "
                "divide a sum by it, as Accelerate's recipe for accumulation does, the loss counts "
                "each target once already, and is weighted a second time: use "
                '`balance(..., loss_reduction="sum")`.'
            )


@contextmanager
def gathers_rows(
    accelerator: Any,
    *,
    has_none: Callable[[], bool] = lambda: False,
    saw_count: Callable[[], None] = lambda: None,
    leaves_out: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Have ``accelerator.gather`` take tensors that have other numbers of rows on other ranks.

    So has a loss that gathers a metric of each sample, such as that of TRL's ``DPOTrainer``. Gloo
    would end the process there, and NCCL hang or mix up rows. A gather of rows begins with one of
    their numbers.

    Args:
        accelerator: of one process or several. ``gather_for_metrics`` gathers by the same.
        has_none: returns whether the rows of this rank stand in for none, and are left out, as are
            objects that ``gather_for_metrics`` takes.
        leaves_out: returns whether numbers of such ranks are left out, too; the same on all ranks.
        saw_count: called where a single integer is gathered.
    """
    if accelerator.num_processes == 1:
        yield
        return
    from accelerate.utils import recursively_apply

    equal_rows, for_metrics = accelerator.gather, accelerator.gather_for_metrics

    def gather(tensor: Any) -> Any:
        def gather_one(one: torch.Tensor) -> Any:
            if one.numel() == 1 and not (one.is_floating_point() or one.is_complex()):
                saw_count()
            if leaves_out():
                one = one.reshape(1) if one.ndim == 0 else one
            return _gathered(equal_rows, one[:0] if one.ndim and has_none() else one)

        return recursively_apply(gather_one, tensor, error_on_other_type=True)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if has_none() and (use_gather_object or not _are_tensors(input_data)):
            return for_metrics([], use_gather_object=True)
        return for_metrics(input_data, use_gather_object)

    accelerator.gather, accelerator.gather_for_metrics = gather, gather_for_metrics
    try:
        yield
    finally:
        accelerator.gather, accelerator.gather_for_metrics = equal_rows, for_metrics


def _gathered(equal_rows: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """Return the rows of all ranks, or their scalars, by a gather of as many rows each."""
    if tensor.ndim == 0:
        return equal_rows(tensor)
    counts = equal_rows(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    most = max(counts)
    if min(counts) == most:
        return equal_rows(tensor)
    padding = tensor.new_zeros((most - len(tensor), *tensor.shape[1:]))
    gathered = equal_rows(torch.cat([tensor, padding])).split(most)
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def _are_tensors(nested: Any) -> bool:
    """Return whether Accelerate gathers rows of ``nested``, and no objects."""
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, nested, error_on_other_type=True)
    except TypeError:
        return False
    return True
