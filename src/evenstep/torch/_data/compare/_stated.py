"""What a rank states about a loader, to be compared with the other ranks'.

Stated is what decides on the samples of a step. Not stated: how samples are fetched, and seeds, as
rank 0 draws the order for all.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from ...._exchange._world_check import qualified
from ..order._samplers import has_own_batches, length_of

_MOST_INDICES = 10_000_000
_BY_SHUFFLE: dict[type, str] = {
    RandomSampler: "RandomSampler (`shuffle=True`)",
    SequentialSampler: "SequentialSampler (`shuffle=False`)",
}
_OF_DISTRIBUTED = ("num_replicas", "shuffle", "drop_last")

_LENGTH = "`len(dataset)`"
_SUBSET = "`Subset(indices=...)`"
_WHOLE = (
    "Give the whole data set, in the same order, to every rank: evenstep splits every batch over "
    "the ranks."
)

SEEDED = f"{_WHOLE} What is drawn at random needs the same seed on all of them."
REMEDIES = {
    _LENGTH: _WHOLE,
    _SUBSET: SEEDED,
    "`DataLoader(batch_size=...)`": "It is a rank's part of an equal split; evenstep itself gives "
    "faster ranks more.",
}
"""What to do where ranks differ, by what is stated."""


def loader_facts(
    loader: DataLoader[Any], *, stream: str | None, global_batch_size: int | None, world_size: int
) -> dict[str, str]:
    """Return what decides on the samples of a step.

    With a global batch size that was given, batch sizes may differ by one.
    """
    size = repr(loader.batch_size)
    even = () if global_batch_size is None else _shares(global_batch_size, world_size)
    if loader.batch_size in even:
        size = " or ".join(map(repr, dict.fromkeys(even)))
    facts = {
        "`DataLoader(batch_size=...)`": size,
        "`DataLoader(drop_last=...)`": repr(loader.drop_last),
    }
    return facts | read_facts(loader, stream=stream)


def read_facts(loader: DataLoader[Any], *, stream: str | None = None) -> dict[str, str]:
    """Return what decides on which samples there are, and on what a batch of them is."""
    dataset = loader.dataset
    facts = {"`DataLoader(collate_fn=...)`": qualified(loader.collate_fn)}
    if stream != "sharded":  # else each rank may have a source of its own kind
        facts["`DataLoader(dataset=...)`"] = qualified(type(dataset))
    if isinstance(dataset, IterableDataset):
        return facts
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # it knows none; any other error is the user's to see
        length = None
    facts[_LENGTH] = str(length)
    facts |= _subset_facts(dataset)
    own = loader.batch_sampler if has_own_batches(loader) else None
    facts["`DataLoader(batch_sampler=...)`"] = "None" if own is None else qualified(type(own))
    return facts | (_sampler_facts(loader.sampler, length) if own is None else _batch_facts(own))


def _shares(global_batch_size: int, world_size: int) -> tuple[int, int]:
    return global_batch_size // world_size, -(-global_batch_size // world_size)


def _sampler_facts(sampler: Any, length: int | None) -> dict[str, str]:
    kind = qualified(type(sampler))
    if isinstance(sampler, DistributedSampler):
        facts = {
            f"`DistributedSampler({name}=...)`": repr(getattr(sampler, name, None))
            for name in _OF_DISTRIBUTED
        }
        facts["`len(DistributedSampler.dataset)`"] = str(length_of(sampler.dataset))
        return facts | {"`DataLoader(sampler=...)`": kind}
    facts = {"`DataLoader(sampler=...)`": _BY_SHUFFLE.get(type(sampler), kind)}
    if isinstance(replacement := getattr(sampler, "replacement", None), bool):
        facts[f"`{type(sampler).__name__}(replacement=...)`"] = repr(replacement)
    own = length_of(sampler)
    facts["`len(sampler)`"] = "that of the data set" if own == length else str(own)
    return facts


def _batch_facts(batches: Any) -> dict[str, str]:
    kind = type(batches).__name__
    facts = {
        "`len(batch_sampler)`": str(length_of(batches)),
    }
    for name in ("batch_size", "drop_last"):
        if isinstance(value := getattr(batches, name, None), int):
            facts[f"`{kind}({name}=...)`"] = repr(value)
    if type(batches) is BatchSampler:
        facts["The sampler in `BatchSampler`"] = qualified(type(batches.sampler))
    return facts


def _subset_facts(dataset: Any) -> dict[str, str]:
    """Return which part of another data set each of nested ``Subset``s is."""
    texts = []
    while isinstance(dataset, Subset):
        texts.append(_indices_text(dataset.indices))
        dataset = dataset.dataset
    return {_SUBSET: " of ".join(texts)} if texts else {}


def _indices_text(indices: Any) -> str:
    if isinstance(indices, range) and len(indices) > _MOST_INDICES:
        return repr(indices)
    try:
        numbers = np.asarray(indices, np.int64).ravel()
    except Exception:  # keys that are no integers: the samples are compared
        return f"{length_of(indices)} keys"
    first = ", ".join(map(str, numbers[:3].tolist()))
    more = ", ..." if len(numbers) > 3 else ""
    return f"[{first}{more}] ({len(numbers)}, checksum {zlib.crc32(numbers.tobytes()):08x})"
