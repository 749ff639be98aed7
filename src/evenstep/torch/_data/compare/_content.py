"""A few samples of a data set, as this rank sees them: the same positions on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...._exchange._world_check import listed, refusal
from ....exceptions import EvenstepWarning, invalid
from .._protocols import Collectives
from ..fetch._random_states import same_chance, seed_all
from ..fetch._torch_loader import fetch, inner_loader
from ._fingerprint import Fingerprint, same_values
from ._stated import SEEDED, length_of

_SEED = 20_011
_CONFIRMATIONS = 10  # fetches of a sample that differs, to be sure that it is not random
_LONGEST_S = 1.0  # after that no further sample is fetched
_WORKER_S = 30.0  # within which a loader worker has to start and answer


@final
@dataclass(frozen=True, slots=True)
class Sample:
    """A sample fetched several times, always from the same random states.

    What differs between the fetches is random in a way that no seed controls, and None here.

    Attributes:
        first: the first of the fetches.
        stable: which of ``"types"``, ``"shapes"``, ``"values"`` are the same in all of them.
    """

    first: Fingerprint
    stable: frozenset[str]

    @classmethod
    def of(cls, prints: Sequence[Fingerprint]) -> Sample:
        """Return what ``prints`` have in common."""
        first, *others = prints
        same = {
            "types": all(other.types == first.types for other in others),
            "shapes": all(other.shapes == first.shapes for other in others),
            "values": all(other == first for other in others),
        }
        return cls(first, frozenset(level for level, alike in same.items() if alike))


def compare_content(ranks: Collectives, loaders: Mapping[str, DataLoader[Any]]) -> None:
    """Raise ValueError on every rank if data sets hold different samples. Collective.

    A few samples of each are compared; those that differ are fetched again. Loaders come by what an
    error calls them.
    """
    wanted = {
        label: positions_in(length_of(loader.dataset) or 0)
        for label, loader in loaders.items()
        if not isinstance(loader.dataset, IterableDataset)
    }
    for repeats in (2, _CONFIRMATIONS):
        mine = {
            label: fetch_samples(loaders[label], positions, repeats)
            for label, positions in wanted.items()
            if positions
        }
        rows: list[dict[str, dict[int, Sample]]] = ranks.collect(mine)
        unlike_at = {label: _unlike_at([row.get(label, {}) for row in rows]) for label in mine}
        wanted = {label: list(found) for label, found in unlike_at.items() if found}
        if not wanted:
            return
    label, positions = next(iter(wanted.items()))
    level = unlike_at[label][positions[0]]
    prints = [row[label][positions[0]].first for row in rows]
    _refuse_errors(prints, positions[0], part=label)
    told = [each.text(level) for each in prints]
    if len(set(told)) == 1:  # they differ in what is too long to be shown
        told = [f"{each.text(level)}, checksum {each.checksum}" for each in prints]
    name = f"Sample {positions[0]} of `DataLoader(dataset=...)`"
    raise ValueError(refusal(name, told, SEEDED, part=label))


def _refuse_errors(prints: Sequence[Fingerprint], position: int, *, part: str) -> None:
    """Raise ValueError if a sample could not be fetched on some ranks: with the error itself."""
    failed = [rank for rank, each in enumerate(prints) if each.trace]
    if not failed:
        return
    first = prints[failed[0]]
    alike = [rank for rank in failed if prints[rank].shown == first.shown]
    raise invalid(
        f"DataLoader(dataset=...){f' ({part})' if part else ''}",
        f"give sample {position} on every rank",
        f"{first.shown} on {listed(alike)}",
        f"Without it that step ends on all. Where rank {failed[0]} was:\n{first.trace.strip()}",
    )


def _unlike_at(samples: Sequence[Mapping[int, Sample]]) -> dict[int, str]:
    """Return in what samples differ between ranks, by position, of those that all could fetch."""
    common = [at for at in samples[0] if all(at in of_rank for of_rank in samples)]
    found = {at: unlike([of_rank[at] for of_rank in samples]) for at in common}
    return {at: level for at, level in found.items() if level is not None}


def unlike(samples: Sequence[Sample]) -> str | None:
    """Return in what one sample differs between ranks: ``"types"``, ``"shapes"``, ``"values"``."""
    mine = samples[0].first
    for level in ("types", "shapes", "values"):
        if not all(level in sample.stable for sample in samples):
            continue
        if level == "values":
            alike = all(same_values(mine, sample.first) for sample in samples)
        else:
            alike = len({getattr(sample.first, level) for sample in samples}) == 1
        if not alike:
            return level
    return None


def positions_in(num_samples: int) -> list[int]:
    """Return the first position, the middle, the last, and two that seem random."""
    if num_samples < 1:
        return []
    odd = [(number * 2654435761 + 12345) % num_samples for number in (1, 2)]
    return sorted({0, num_samples // 2, num_samples - 1, *odd})


def fetch_samples(
    loader: DataLoader[Any], positions: Sequence[int], repeats: int
) -> dict[int, Sample]:
    """Return samples by position; empty where a loader worker could not tell.

    In a loader worker of its own where the loader has workers, set up as theirs, and never in this
    process then. Random states are left as they were.
    """
    if loader.num_workers == 0:
        with same_chance():
            return _looked_at(loader.dataset, positions, repeats)
    probe = _Probe(loader.dataset, positions, repeats)
    try:
        (samples,) = inner_loader(
            loader,
            probe,
            torch.Generator(),
            num_workers=1,
            timeout=max(_WORKER_S, loader.timeout),
        )
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(
            f"No samples of {type(loader.dataset).__name__} were compared across ranks: the loader "
            f"worker for that failed ({text}). Give all ranks the same data set in the same order.",
            EvenstepWarning,
            stacklevel=6,
        )
        return {}
    return samples  # type: ignore[no-any-return]


@final
class _Probe(Dataset[dict[int, Sample]]):
    """A data set of one item: what a loader worker finds in the user's."""

    def __init__(self, dataset: Any, positions: Sequence[int], repeats: int) -> None:
        self.dataset = dataset
        self._positions = positions
        self._repeats = repeats

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[int, Sample]:
        return _looked_at(self.dataset, self._positions, self._repeats)


def _looked_at(dataset: Any, positions: Sequence[int], repeats: int) -> dict[int, Sample]:
    began_s = perf_counter()
    found: dict[int, Sample] = {}
    for position in positions:
        if found and perf_counter() - began_s > _LONGEST_S:
            break
        found[position] = Sample.of([_print(dataset, position) for _ in range(repeats)])
    return found


def _print(dataset: Any, position: int) -> Fingerprint:
    seed_all(_SEED + position % 1000)
    try:
        (sample,) = fetch(dataset, [position])
        return Fingerprint.of(sample)
    except Exception as error:  # of the user's code; training would meet it too, or never ask
        return Fingerprint.of_error(error)
