"""What a sample looks like, and a few of a data set, compared at the same places by all ranks."""

from __future__ import annotations

import array
import hashlib
import logging
import math
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ...._exchange._world_check import listed, refusal
from ...._nested_tensors import tensors_in
from ...._planner import Cost, in_words
from ...._warning import warn
from ....exceptions import invalid
from .._protocols import Collectives
from ..fetch._loader_workers import asked, fetch, seed_all
from ..order._drawing import length_of
from ._stated import SEEDED

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

    def size(some: list[Any]) -> int:
        return sum(tensor.numel() for tensor in tensors_in(collate(some)))

    apart = sum(size([sample]) for sample in samples)
    return size(samples) > apart


_CHUNK = 1 << 20  # numbers that are looked at together
_MOST_PARTS = 10_000  # of one sample; what follows is left out
_MOST_SHOWN = 90  # characters of a sample in an error
# By how much hardware and libraries differ in a float32, which a wider type may carry on.
_ROUNDING = 1e-5
_SLACK = 4.0  # units of rounding of narrower types

_LEVELS = ("types", "shapes", "values")

Sketch = tuple[float, float, float, float]
"""Of floating-point numbers: sum of sizes, weighted sum, Euclidean norm, relative rounding."""


@final
@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One sample as it was fetched once.

    Attributes:
        types: types, dtypes and numbers of dimensions of all in it.
        shapes: shapes and lengths.
        exact: checksum of what is compared bit by bit: integers, text, images.
        sketches: of floating-point numbers, whose last bits depend on the hardware.
        shown: a short text for people.
        trace: of the error, in a sample that could not be fetched; else empty.
    """

    types: str
    shapes: str
    exact: str
    sketches: tuple[Sketch, ...]
    shown: str
    trace: str = field(default="", compare=False)

    @classmethod
    def of(cls, sample: Any) -> Fingerprint:
        """Return the fingerprint of ``sample``."""
        walk = _Walk()
        types, shapes = walk.go(sample)
        shown = ", ".join(walk.shown)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[: _MOST_SHOWN - 4]} ..."
        return cls(types, shapes, walk.checksum.hexdigest(), tuple(walk.sketches), f"({shown})")

    @classmethod
    def of_error(cls, error: Exception) -> Fingerprint:
        """Return that of a sample which could not be fetched."""
        trace = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__} raised", "", "", (), in_words(error), trace)


def same_values(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether two samples are equal, up to rounding."""
    if one.exact != other.exact or len(one.sketches) != len(other.sketches):
        return False
    return all(map(_close, one.sketches, other.sketches))


def _alike(level: str, one: Fingerprint, other: Fingerprint) -> bool:
    if level == "values":
        return same_values(one, other)
    return bool(getattr(one, level) == getattr(other, level))


def _close(mine: Sketch, theirs: Sketch) -> bool:
    size, _, norm, rounding = map(max, mine, theirs)
    # Rounding is of any sign, so a weighted sum is off by far less than by the sum of sizes.
    return (
        abs(mine[0] - theirs[0]) <= rounding * size and abs(mine[1] - theirs[1]) <= rounding * norm
    )


class _Walk:
    """Goes through a sample once; ``go`` returns the text of types and that of shapes."""

    def __init__(self) -> None:
        self.checksum = hashlib.blake2b(digest_size=8)
        self.sketches: list[Sketch] = []
        self.shown: list[str] = []
        self._num_parts = 0

    def go(self, value: Any) -> tuple[str, str]:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            return "...", ""
        if value is None or isinstance(value, bool | int | str | bytes):
            return self._exactly(value)
        if isinstance(value, float | complex):
            self._floats(np.asarray([value]), 0.0)
            self._show(f"{value:.4g}")
            return type(value).__name__, ""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(np.asarray(value))
        return self._container(value)

    def _container(self, value: Any) -> tuple[str, str]:
        name = type(value).__name__
        if isinstance(value, Mapping):
            items = sorted(value.items(), key=lambda item: repr(item[0]))
            return self._fixed(name, [(repr(key), part) for key, part in items])
        if is_dataclass(value):
            parts = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
            return self._fixed(name, parts)
        if isinstance(value, tuple):
            return self._fixed(name, [("", part) for part in value])
        if isinstance(value, set | frozenset):
            return self._exactly(sorted(map(repr, value)), name)
        if isinstance(value, bytearray | memoryview | array.array):
            return self._exactly(bytes(value), name)
        if isinstance(value, Sequence):
            return self._list(name, value)
        if hasattr(value, "tobytes") and hasattr(value, "size"):  # a picture of Pillow's
            self._show(f"{name} {value.size}")
            self.checksum.update(value.tobytes())
            return f"{name} {getattr(value, 'mode', '')}", f"{value.size}"
        self._show(name)
        return name, ""

    def _fixed(self, name: str, parts: list[tuple[str, Any]]) -> tuple[str, str]:
        """Go through what has its parts in places that mean something."""
        texts = [(key, *self.go(part)) for key, part in parts]
        types = ", ".join(f"{key} {text}".strip() for key, text, _ in texts)
        return f"{name}({types})", ";".join(text for _, _, text in texts)

    def _list(self, name: str, value: Sequence[Any]) -> tuple[str, str]:
        """Go through what may have any length: its type is that of its parts, without number."""
        if len(value) > 1 and all(type(part) is float for part in value):
            types, shapes = self._array(np.asarray(value))
            return f"{name}[{types}]", shapes
        if len(value) > 1 and all(type(part) in (int, str, bool) for part in value):
            kinds = sorted({type(part).__name__ for part in value})
            self._exactly(list(value), name)
            return f"{name}[{', '.join(kinds)}]", str(len(value))
        texts = [self.go(part) for part in value]
        kinds = sorted({types for types, _ in texts})
        shapes = ";".join(text for _, text in texts)
        return f"{name}[{', '.join(kinds)}]", f"{len(value)}:{shapes}"

    def _exactly(self, value: Any, name: str | None = None) -> tuple[str, str]:
        text = repr(value)
        self.checksum.update(text.encode(errors="replace") + b"\0")
        self._show(text[:40])
        return name or type(value).__name__, ""

    def _array(self, value: np.ndarray[Any, Any]) -> tuple[str, str]:
        if value.dtype.kind == "O":
            return self._list("object", value.ravel().tolist())
        rounding = float(np.finfo(value.dtype).eps) if value.dtype.kind in "fc" else 0.0
        return self._numbers(str(value.dtype), value.shape, value.ravel(), rounding)

    def _tensor(self, value: torch.Tensor) -> tuple[str, str]:
        dtype = str(value.dtype).removeprefix("torch.")
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            kind = f"{dtype}[{value.ndim}d] {value.layout}"
            self._show(kind)
            return kind, ""
        flat, rounding = value.detach().cpu().reshape(-1).resolve_conj().resolve_neg(), 0.0
        if flat.dtype.is_floating_point or flat.dtype.is_complex:
            rounding = torch.finfo(flat.dtype).eps
        if flat.dtype.is_floating_point and flat.dtype.itemsize < 4:  # NumPy has not all of them
            flat = flat.float()
        return self._numbers(dtype, tuple(value.shape), flat.numpy(), rounding)

    def _numbers(
        self, dtype: str, shape: tuple[int, ...], flat: np.ndarray[Any, Any], rounding: float
    ) -> tuple[str, str]:
        if flat.dtype.kind in "fc":
            self._floats(flat, rounding)
        elif flat.size:
            self.checksum.update(flat.view(np.uint8).data)
        first = flat[:3].tolist()
        shown = ", ".join(f"{part:.4g}" if isinstance(part, float) else str(part) for part in first)
        more = ", ..." if flat.size > len(first) else ""
        self._show(f"{dtype}{list(shape) if shape else ''} {shown}{more}")
        return f"{dtype}[{len(shape)}d]", f"{shape}"

    @np.errstate(all="ignore")
    def _floats(self, flat: np.ndarray[Any, Any], rounding: float) -> None:
        """Take note of numbers whose last bits may differ: of their sizes and of their places."""
        size = placed = squares = 0.0
        parts = flat.view(flat.real.dtype)  # real and imaginary ones
        for first in range(0, len(parts), _CHUNK):
            chunk = parts[first : first + _CHUNK].astype(np.float64)
            finite = np.isfinite(chunk)
            if not finite.all():
                odd = np.nan_to_num(chunk, nan=2.0, posinf=3.0, neginf=4.0)
                self.checksum.update(np.where(finite, 0.0, odd).astype(np.uint8).tobytes())
                chunk[~finite] = 0.0
            size += float(np.abs(chunk).sum())
            squares += float(np.square(chunk).sum())
            placed += float((chunk * _weights(first, len(chunk))).sum())
        if math.isfinite(squares):
            room = max(_SLACK * rounding, _ROUNDING)
            self.sketches.append((size, placed, math.sqrt(squares), room))

    def _show(self, text: str) -> None:
        if len(self.shown) < 8:
            self.shown.append(text)


def _weights(first: int, num: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return numbers from -1 to 1 without a pattern, so that parts in another order are noticed."""
    places = np.arange(first + 1, first + num + 1, dtype=np.int64)
    return ((places * 2654435761) & 0xFFFFFFFF) / 2**31 - 1.0


_SEED = 20_011
_CONFIRMATIONS = 10  # fetches of a sample that differs, to be sure that it is not random
_LONGEST_S = 1.0  # after that no further sample is fetched


Sample = Sequence[Fingerprint]
"""A sample fetched several times, always from the same random states.

What differs between the fetches is random in a way that no seed controls.
"""


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
        differ_at = {label: _differ_at([row.get(label, {}) for row in rows]) for label in mine}
        wanted = {label: list(found) for label, found in differ_at.items() if found}
        if not wanted:
            return
    label, positions = next(iter(wanted.items()))
    level = differ_at[label][positions[0]]
    prints = [row[label][positions[0]][0] for row in rows]
    _refuse_errors(prints, positions[0], part=label)
    texts = [str(getattr(each, "shown" if level == "values" else level)) for each in prints]
    if len(set(texts)) == 1:  # they differ in what is too long to be shown
        sums = [f"{each.exact}:{zlib.crc32(repr(each.sketches).encode()):08x}" for each in prints]
        texts = [f"{text}, checksum {own}" for text, own in zip(texts, sums, strict=True)]
    name = f"Sample {positions[0]} of `DataLoader(dataset=...)`"
    raise ValueError(refusal(name, texts, SEEDED, part=label))


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


def _differ_at(samples: Sequence[Mapping[int, Sample]]) -> dict[int, str]:
    """Return in what samples differ between ranks, by position, of those that all could fetch."""
    common = [at for at in samples[0] if all(at in of_rank for of_rank in samples)]
    found = {at: unlike([of_rank[at] for of_rank in samples]) for at in common}
    return {at: level for at, level in found.items() if level is not None}


def unlike(samples: Sequence[Sample]) -> str | None:
    """Return in what one sample differs between ranks: ``"types"``, ``"shapes"``, ``"values"``.

    What is not the same in all fetches of a rank is not compared.
    """
    for level in _LEVELS:
        is_stable = all(_alike(level, own[0], each) for own in samples for each in own)
        if is_stable and not all(_alike(level, samples[0][0], own[0]) for own in samples):
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
    """Return samples by position; empty where a loader worker could not fetch them.

    Random states are left as they were.
    """
    try:
        return asked(loader, partial(_looked_at, loader.dataset, positions, repeats))
    except Exception as error:
        warn(
            f"No samples of {type(loader.dataset).__name__} were compared across ranks: the loader "
            f"worker for that failed ({in_words(error)}). Give all ranks the same data set in the "
            f"same order."
        )
        return {}


def _looked_at(dataset: Any, positions: Sequence[int], repeats: int) -> dict[int, Sample]:
    began_s = perf_counter()
    found: dict[int, Sample] = {}
    for position in positions:
        if found and perf_counter() - began_s > _LONGEST_S:
            break
        found[position] = [_print(dataset, position) for _ in range(repeats)]
    return found


def _print(dataset: Any, position: int) -> Fingerprint:
    seed_all(_SEED + position % 1000)
    try:
        (sample,) = fetch(dataset, [position])
        return Fingerprint.of(sample)
    except Exception as error:  # of the user's code; training would meet it too, or never ask
        return Fingerprint.of_error(error)
