"""Whether a loader's collator pads: rank 0 shows it a few samples, before training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...._planner import Cost
from .._protocols import Collectives
from ..fetch._torch_loader import asked

_LOGGER = logging.getLogger("evenstep")
_NUM_SHOWN = 8  # samples, where lengths are not known


def read_cost(cost: Cost | None, loader: DataLoader[Any], ranks: Collectives) -> Cost | None:
    """Return what the samples of a loader cost, and whether they are padded. Collective.

    Raises:
        ValueError: as for ``Cost.read``.
    """
    if cost is None or isinstance(loader.dataset, IterableDataset):
        return cost
    found = cost.read(loader.dataset)
    if found.padded is not None:
        return found
    shown = _shown(found, len(loader.dataset)) if ranks.rank == 0 else []  # type: ignore[arg-type]
    return replace(found, padded=bool(ranks.share(len(shown) > 1 and pads(loader, *shown))))


def _shown(cost: Cost, num_samples: int) -> list[int]:
    """Return samples of different lengths; of unknown ones, some that are likely to differ."""
    if cost.from_batch is not None:
        last, spaces = num_samples - 1, _NUM_SHOWN - 1
        return sorted({place * last // spaces for place in range(_NUM_SHOWN)})
    ends = [int(cost.of.argmin()), int(cost.of.argmax())] if cost.of.ndim == 1 else []
    return ends if ends and cost.of[ends[0]] < cost.of[ends[1]] else []


def pads(loader: DataLoader[Any], *indices: int) -> bool:
    """Return whether a batch of some samples has more elements than batches of one.

    Random states are left as they were. False where that is unknown, as for samples that raise by
    themselves.
    """
    try:
        return asked(loader, partial(_pads, loader.dataset, loader.collate_fn, indices))
    except Exception as error:
        _LOGGER.info("The collator was not asked whether it pads, as it raised: %r", error)
        return False


def _pads(dataset: Any, collate: Callable[[list[Any]], Any], indices: Sequence[int]) -> bool:
    samples = [dataset[at] for at in indices]
    apart = sum(_num_elements(collate([sample])) for sample in samples)
    return _num_elements(collate(samples)) > apart


def _num_elements(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return sum(map(_num_elements, batch)) if isinstance(batch, list | tuple) else 0
