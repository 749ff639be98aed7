"""Whether a loader's collator pads: rank 0 shows it two samples, before training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...._planner import Cost
from .._protocols import Collectives
from ..fetch._torch_loader import inner_loader
from ._content import same_chance

_LOGGER = logging.getLogger("evenstep")
_WORKER_S = 30.0  # within which a loader worker has to start and answer


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
    ends = int(found.of.argmin()), int(found.of.argmax())
    looks = ranks.rank == 0 and found.of.ndim == 1 and found.of[ends[0]] < found.of[ends[1]]
    return replace(found, padded=bool(ranks.share(looks and pads(loader, *ends))))


def pads(loader: DataLoader[Any], short: int, long: int) -> bool:
    """Return whether a batch of two samples has more elements than two batches of one.

    In a loader worker where the loader has workers, and never in this process then. Random states
    are left as they were. False where it cannot be told, as of samples that raise by themselves.
    """
    probe = _Probe(loader, short, long)
    try:
        if loader.num_workers == 0:
            with same_chance():
                return probe[0]
        timeout = max(_WORKER_S, loader.timeout)
        inner = inner_loader(loader, probe, torch.Generator(), num_workers=1, timeout=timeout)
        return bool(next(iter(inner)))
    except Exception as error:
        _LOGGER.info("The collator was not asked whether it pads, as it raised: %r", error)
        return False


@final
class _Probe(Dataset[bool]):
    """A data set of one item: what a loader worker finds out."""

    def __init__(self, loader: DataLoader[Any], short: int, long: int) -> None:
        self.dataset = loader.dataset
        self._collate = loader.collate_fn
        self._indices = short, long

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        one, two = ([self.dataset[at]] for at in self._indices)
        apart = sum(_num_elements(self._collate(list(samples))) for samples in (one, two))
        return _num_elements(self._collate([*one, *two])) > apart


def _num_elements(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return sum(map(_num_elements, batch)) if isinstance(batch, list | tuple) else 0
