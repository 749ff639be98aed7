"""Whether a loader's collator pads: rank 0 shows it a few samples, before training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...._planner import Cost
from .._protocols import Collectives
from ..fetch._torch_loader import inner_loader, same_chance

_LOGGER = logging.getLogger("evenstep")
_NUM_SHOWN = 8  # samples, where lengths are not known
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
    shown = _shown(found, len(loader.dataset)) if ranks.rank == 0 else []  # type: ignore[arg-type]
    return replace(found, padded=bool(ranks.share(len(shown) > 1 and pads(loader, *shown))))


def _shown(cost: Cost, num_samples: int) -> list[int]:
    """Return samples of unlike lengths; where those are not known, some that are likely to be."""
    if cost.from_batch is not None:
        last, spaces = num_samples - 1, _NUM_SHOWN - 1
        return sorted({place * last // spaces for place in range(_NUM_SHOWN)})
    ends = [int(cost.of.argmin()), int(cost.of.argmax())] if cost.of.ndim == 1 else []
    return ends if ends and cost.of[ends[0]] < cost.of[ends[1]] else []


def pads(loader: DataLoader[Any], *indices: int) -> bool:
    """Return whether a batch of some samples has more elements than batches of one.

    In a loader worker where the loader has workers, and never in this process then. Random states
    are left as they were. False where it cannot be told, as of samples that raise by themselves.
    """
    probe = _Probe(loader, indices)
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

    def __init__(self, loader: DataLoader[Any], indices: Sequence[int]) -> None:
        self.dataset = loader.dataset
        self._collate = loader.collate_fn
        self._indices = indices

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        samples = [self.dataset[at] for at in self._indices]
        apart = sum(_num_elements(self._collate([sample])) for sample in samples)
        return _num_elements(self._collate(samples)) > apart


def _num_elements(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.numel()
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return sum(map(_num_elements, batch)) if isinstance(batch, list | tuple) else 0
