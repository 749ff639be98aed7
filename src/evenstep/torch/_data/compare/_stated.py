"""What a rank states about a loader, to be compared with the other ranks'.

Stated is what decides on the samples of a step. Not stated: how samples are fetched, and seeds, as
rank 0 draws the order for all.
"""

from __future__ import annotations

import io
import operator
import pickle
import random
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)

from ...._exchange._world_check import qualified, refusal
from ....exceptions import invalid
from .._protocols import Collectives
from ..fetch._loader_workers import same_chance, seed_all
from ..order._drawing import Draws, has_own_batches, length_of

# Without anything that depends on the rank, or taken apart instead of drawn.
_STOCK = (SequentialSampler, RandomSampler, WeightedRandomSampler, DistributedSampler, Draws)
_MOST_DRAWN = 1 << 14  # indices, as in the first block of an order
_SHOWN = 4
_SHARED = (Dataset, nn.Module, dist.ProcessGroup, type, types.FunctionType, types.ModuleType)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_ATOMS = (int, float, str, bool, type(None))
_SEED = 20_011

_ORDER_REMEDY = (
    "evenstep draws the order on rank 0 for all ranks, and splits it. Give a sampler that covers "
    "all samples, made alike on every rank: without sharding or a seed by rank, so with "
    "`num_replicas=1, rank=0` where it takes such arguments."
)
_STREAM_REMEDY = (
    'Give the whole stream to every rank, or prepare with `stream="sharded"`, where each rank '
    "reads its own part."
)

Drawn = tuple[int, list[int]]
"""A checksum of what an order begins with, and its first indices."""


def compare_orders(ranks: Collectives, loaders: Mapping[str, DataLoader[Any]]) -> None:
    """Raise ValueError on every rank if samplers yield another order on each. Collective.

    Copies of them draw, from equal random states. Samplers that cannot be copied, such as one-shot
    iterators, and those that draw by chance that no seed controls are not compared. Rank 0 draws
    before the others, so that these wait in a collective where its sampler never answers.
    """
    asked = {label: loader for label, loader in loaders.items() if _is_own(loader)}
    mine = {label: _drawn(loader) for label, loader in asked.items()} if not ranks.rank else {}
    if not ranks.share(bool(asked)):
        return
    if ranks.rank:
        mine = {label: _drawn(loader) for label, loader in asked.items()}
    rows: list[dict[str, Drawn | None]] = ranks.collect(mine)
    for label, loader in asked.items():
        found = [row.get(label) for row in rows]
        known = [one for one in found if one is not None]
        if len(known) < len(found) or len({checksum for checksum, _ in known}) == 1:
            continue
        own = "batch_sampler" if has_own_batches(loader) else "sampler"
        shown = [f"[{', '.join(map(str, first))}, ...]" for _, first in known]
        if len(set(shown)) == 1:
            shown = [
                f"{text} (checksum {one[0]:08x})" for text, one in zip(shown, known, strict=True)
            ]
        name = f"What `DataLoader({own}=...)` yields from equal random states"
        raise ValueError(refusal(name, shown, _ORDER_REMEDY, part=label))


def shard_of(loader: DataLoader[Any], *, stream: str | None) -> tuple[str, int, int] | None:
    """Return the class, rank and number of ranks of a stream that Hugging Face split by node."""
    source = getattr(loader.dataset, "_distributed", None)
    if stream != "same" or not isinstance(loader.dataset, IterableDataset) or source is None:
        return None
    if getattr(source, "world_size", 1) < 2:
        return None
    return type(loader.dataset).__name__, source.rank, source.world_size


def check_whole(shards: Sequence[tuple[str, int, int] | None]) -> None:
    """Raise if each rank reads a part of its own of a stream that all are to read."""
    found = [shard for shard in shards if shard is not None]
    if len(found) == len(shards) and len({rank for _, rank, _ in found}) > 1:
        raise invalid(
            "Balancer.prepare(stream=...)",
            'be "sharded" for a stream of which each rank has a part',
            f"'same' with a {found[0][0]} that gives each of {found[0][2]} ranks its own",
            _STREAM_REMEDY,
        )


def _is_own(loader: DataLoader[Any]) -> bool:
    """Return whether an order is drawn by other code than torch's."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    batches = loader.batch_sampler if has_own_batches(loader) else None
    if batches is not None and type(batches) is not BatchSampler:
        return True
    return type(loader.sampler if batches is None else batches.sampler) not in _STOCK


def _drawn(loader: DataLoader[Any]) -> Drawn | None:
    """Return what the loader's order begins with; None if a draw fails or two draws differ."""
    own = has_own_batches(loader)
    with same_chance():
        try:
            copied = _copier(loader.batch_sampler if own else loader.sampler, loader.dataset)
            first, second = [_beginning(copied(), own_batches=own) for _ in range(2)]
        except Exception:  # of the user's code, or no integers: its first loop says so
            return None
    return first if first == second else None


def first_indices(sampler: Any) -> list[int]:
    """Return the first indices of a copy of a sampler; none of one that cannot be copied."""
    with same_chance():
        try:
            return list(map(operator.index, islice(_copier(sampler, None)(), _MOST_DRAWN)))
        except Exception:  # of the user's code, or no integers: its first loop says so
            return []


def _beginning(sampler: Any, *, own_batches: bool) -> Drawn:
    seed_all(_SEED)
    checksum, num_drawn, first = 0, 0, list[int]()
    for item in islice(sampler, _MOST_DRAWN):
        indices = [operator.index(index) for index in (item if own_batches else [item])]
        checksum = crc32(repr(indices).encode(), checksum)
        first += indices[: _SHOWN - len(first)]
        num_drawn += len(indices)
        if num_drawn >= _MOST_DRAWN:
            break
    return checksum, first


def _copier(sampler: object, dataset: object) -> Callable[[], Any]:
    """Return what copies a sampler as it is now, with random states that are equal on all ranks.

    The copies share its data, models and code.

    Raises:
        Exception: it cannot be copied.
    """
    shared: dict[int, Any] = {}  # by their identities

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if type(value) in _ATOMS or not _is_shared(value, dataset):
                return None
            shared[id(value)] = value
            return id(value)

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, identity: int) -> Any:
            return _seeded(shared[identity])

    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(sampler)
    return lambda: Unpickler(io.BytesIO(file.getvalue())).load()


def _is_shared(value: Any, dataset: object) -> bool:
    is_data = value is dataset or hasattr(type(value), "__getitems__")
    return is_data or isinstance(value, (*_SHARED, *_GENERATORS))


def _seeded(value: Any) -> Any:
    """Return ``value``, or a generator of its kind that is seeded alike on all ranks."""
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).manual_seed(_SEED)
    if isinstance(value, np.random.Generator):
        bits: Any = type(value.bit_generator)
        return np.random.Generator(bits(_SEED))
    if isinstance(value, np.random.RandomState | random.Random):
        return type(value)(_SEED)
    return value


_MOST_INDICES = 10_000_000
_BY_SHUFFLE: dict[type, str] = {
    RandomSampler: "RandomSampler (`shuffle=True`)",
    SequentialSampler: "SequentialSampler (`shuffle=False`)",
}

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
    if global_batch_size is not None:
        even = global_batch_size // world_size, -(-global_batch_size // world_size)
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


def _sampler_facts(sampler: Any, length: int | None) -> dict[str, str]:
    kind = qualified(type(sampler))
    if isinstance(sampler, DistributedSampler):
        facts = {
            f"`DistributedSampler({name}=...)`": repr(getattr(sampler, name, None))
            for name in ("num_replicas", "shuffle", "drop_last")
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
    facts = {"`len(batch_sampler)`": str(length_of(batches))}
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
