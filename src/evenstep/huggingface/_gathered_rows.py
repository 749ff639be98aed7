"""Rows of unlike numbers, gathered from all ranks as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def gathers_rows(
    accelerator: Any, *, has_none: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Have ``accelerator.gather`` take tensors that have other numbers of rows on other ranks.

    So has a loss that gathers a metric of each sample, such as that of TRL's ``DPOTrainer``. Gloo
    would end the process there, and NCCL hang or mix up rows. A gather of rows begins with one of
    their numbers.

    Args:
        accelerator: of one process or several. ``gather_for_metrics`` gathers by the same.
        has_none: tells whether the rows of this rank stand in for none, and are left out.
    """
    if accelerator.num_processes == 1:
        yield
        return
    from accelerate.utils import recursively_apply  # type: ignore[import-untyped]

    equal_rows = accelerator.gather

    def gather_one(tensor: torch.Tensor) -> Any:
        if tensor.ndim == 0:
            return equal_rows(tensor)
        if has_none():
            tensor = tensor[:0]
        counts = equal_rows(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        most = max(counts)
        if min(counts) == most:
            return equal_rows(tensor)
        padding = tensor.new_zeros((most - len(tensor), *tensor.shape[1:]))
        gathered = equal_rows(torch.cat([tensor, padding])).split(most)
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])

    def gather(tensor: Any) -> Any:
        return recursively_apply(gather_one, tensor, error_on_other_type=True)

    accelerator.gather = gather
    try:
        yield
    finally:
        accelerator.gather = equal_rows
