"""Samplers and data sets that give each rank a part of its own, which would be split once more."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from ....exceptions import invalid
from ..fetch._random_states import same_chance, seed_all
from ..order._samplers import has_own_batches
from ._stated import length_of

_RANKS = ("rank", "process_index", "shard_id", "shard_index")
_WORLDS = ("num_replicas", "world_size", "num_processes", "num_shards", "num_ranks")
_STOCK = (SequentialSampler, RandomSampler, WeightedRandomSampler)
_MOST_DRAWN = 1 << 20  # of a sampler's indices, to see whether ranks have any in common
_FEWEST = 8  # indices by which parts of chance are told from parts by rank
_SKETCH = 64

_REMEDY = (
    "Give the whole data set to every rank, without a sampler that shards, as in "
    "`DataLoader(dataset, shuffle=True)`: evenstep splits every batch over the ranks."
)


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """What tells whether a rank's loader reads a part of its own.

    Attributes:
        kind: the class in question.
        named: its rank and the number of ranks, where it shows them and is no whole data set.
        some: some of the indices that it yields: of two samplers with indices in common, most
            likely some of the same. Empty where it is too long for a part, or tells nothing.
    """

    kind: str
    named: tuple[int, int] | None = None
    some: tuple[int, ...] = ()


def shard_of(loader: DataLoader[Any], *, world_size: int, stream: str | None) -> Shard | None:
    """Return what hints at a part of the data set for each rank; None where nothing does."""
    if isinstance(loader.dataset, IterableDataset):
        source = getattr(loader.dataset, "_distributed", None)  # Hugging Face's, split by node
        named = _named(source) if stream == "same" else None
        return None if named is None else Shard(type(loader.dataset).__name__, named)
    if has_own_batches(loader):
        batches: Any = loader.batch_sampler
        for part in (batches, getattr(batches, "sampler", None)):
            if not isinstance(part, DistributedSampler) and (named := _named(part)) is not None:
                return Shard(type(part).__name__, named)
        return None
    sampler, whole = loader.sampler, length_of(loader.dataset)
    length = length_of(sampler)
    if isinstance(sampler, DistributedSampler) or length is None or whole is None:
        return None
    if length >= whole or type(sampler) in _STOCK:
        return None
    named = _named(sampler)
    near = whole / 2 <= length * world_size <= whole + world_size
    some = _some(sampler) if near and _FEWEST <= length <= _MOST_DRAWN else ()
    return Shard(type(sampler).__name__, named, some)


def check_whole(shards: Sequence[Shard | None]) -> None:
    """Raise if each rank's loader reads a part of its own: it would be split once more."""
    found = [shard for shard in shards if shard is not None]
    if len(found) < len(shards) or len(shards) < 2:
        return
    named = [shard.named for shard in found]
    if len(set(named)) == len(named) and all(name and name[1] == len(shards) for name in named):
        got = f"a {found[0].kind} that gives each of {len(shards)} ranks its own"
    elif all(one.some and not set(one.some) & set(two.some) for one, two in combinations(found, 2)):
        got = f"a {found[0].kind} whose indices no two ranks have in common"
    else:
        return
    raise invalid("DataLoader(sampler=...)", "yield samples of the whole data set", got, _REMEDY)


def _named(part: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks that an object shows, where these are several."""
    ranks, worlds = _numbers(part, _RANKS), _numbers(part, _WORLDS)
    return (ranks[0], worlds[0]) if ranks and worlds and worlds[0] > 1 else None


def _numbers(part: Any, names: Sequence[str]) -> list[int]:
    values = [getattr(part, prefix + name, None) for name in names for prefix in ("", "_")]
    return [value for value in values if type(value) is int]


def _some(sampler: Any) -> tuple[int, ...]:
    """Return those of a sampler's indices that have the smallest hashes.

    Of a copy, from random states that are the same on all ranks: what is shuffled first and shared
    out then shares out one order, and samplers that do not shard yield the same.
    """
    alike = copy.copy(sampler)
    with same_chance():
        seed_all(0)
        try:
            if isinstance(getattr(alike, "generator", None), torch.Generator):
                alike.generator = torch.Generator().manual_seed(0)
            numbers = np.unique(np.fromiter(islice(alike, _MOST_DRAWN), np.int64))
        except Exception:  # of the user's code, or no integers: its first loop says so
            return ()
    hashes = (numbers.astype(np.uint64) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    return tuple(map(int, numbers[np.argsort(hashes, kind="stable")[:_SKETCH]]))
