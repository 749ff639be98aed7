"""Rows of unlike numbers, gathered from all ranks as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
        has_none: tells whether the rows of this rank stand in for none, and are left out, as are
            objects that ``gather_for_metrics`` takes.
        leaves_out: tells whether numbers of such ranks are left out, too; the same on all ranks.
        saw_count: called where a single integer is gathered.
    """
    if accelerator.num_processes == 1:
        yield
        return
    from accelerate.utils import recursively_apply  # type: ignore[import-untyped]

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
    """Tell whether Accelerate gathers rows of ``nested``, and no objects."""
    from accelerate.utils import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, nested, error_on_other_type=True)
    except TypeError:
        return False
    return True
