"""What the profiles of all workers measured, and their form on a disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np

from .._types import FloatArray, IntArray
from .._valid import own
from ..exceptions import invalid
from ._best_fit import BestFit, best_fit
from ._cubic import CubicTime
from ._fits import CUBIC, PIECEWISE, fit
from ._piecewise import PiecewiseTime
from ._profile import Profile

SCHEMA: Final = "evenstep.cluster-profile"
VERSION: Final = 1
FIELDS: Final = ("model", "workers", "profiles", "capacity_bytes", "out_of_memory")


@final
@dataclass(frozen=True, slots=True, eq=False, init=False)
class ClusterProfile:
    """Times and memory of one model on every worker, as ``Balancer.profile`` measures them.

    ``best_fit``, ``cubic`` and ``piecewise`` turn it into the time models that ``allocate``,
    ``LbBsp2018(profile=...)`` and ``Lbb(profile=...)`` take.

    Args:
        workers: each worker's host and device, ``(world_size,)``; ranks of one CPU are alike.
        profiles: what was measured on each, one per worker. Their sizes may differ.
        capacity_bytes: memory that each can use, integers of at least 0, ``(world_size,)``, 0
            where it is not known; None where none is.
        out_of_memory: the size that did not fit into a worker's memory, at which its
            measurements end, likewise, 0 where all did; None where all did everywhere.
        model: what was measured, in words.

    Raises:
        ValueError: there are no workers, or not as many of one thing as of another; a number is
            negative.
    """

    workers: tuple[str, ...]
    profiles: tuple[Profile, ...]
    capacity_bytes: IntArray
    out_of_memory: IntArray
    model: str

    def __init__(
        self,
        workers: Sequence[str],
        profiles: Sequence[Profile],
        *,
        capacity_bytes: Sequence[int] | IntArray | None = None,
        out_of_memory: Sequence[int] | IntArray | None = None,
        model: str = "",
    ) -> None:
        if isinstance(workers, str) or not workers or any(type(w) is not str for w in workers):
            rule, remedy = "be a list of texts", "Give each worker's host and device."
            raise invalid("ClusterProfile(workers=...)", rule, repr(workers)[:60], remedy)
        if len(profiles) != len(workers) or any(type(each) is not Profile for each in profiles):
            rule = f"be {len(workers)} `Profile`s, one for each of `workers`"
            got, remedy = repr(profiles)[:60], "Add or remove some."
            raise invalid("ClusterProfile(profiles=...)", rule, got, remedy)
        values = (
            tuple(workers),
            tuple(profiles),
            _per_worker("capacity_bytes", capacity_bytes, len(workers)),
            _per_worker("out_of_memory", out_of_memory, len(workers)),
            str(model),
        )
        names = ("workers", "profiles", "capacity_bytes", "out_of_memory", "model")
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)  # past the frozen guard, as a generated one goes

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.workers)

    @property
    def sizes(self) -> IntArray:
        """All batch sizes that any worker was measured at, ascending, ``(num_sizes,)``."""
        return np.unique(np.concatenate([each.sizes for each in self.profiles]))

    @property
    def seconds(self) -> FloatArray:
        """What they took, the median of repeats, ``(num_sizes, world_size)``.

        NaN where a worker was not measured.
        """
        return self._table([each.seconds for each in self.profiles], np.median, np.nan)

    @property
    def peak_bytes(self) -> IntArray:
        """The memory peaks, the most of repeats, ``(num_sizes, world_size)``; 0 is unknown."""
        peaks = [np.zeros(1) if p.peak_bytes is None else p.peak_bytes for p in self.profiles]
        return self._table(peaks, np.max, 0).astype(np.int64)

    def best_fit(self) -> BestFit:
        """Return the kind of curve that foretells each worker best.

        The kinds are a line, flat and then a line, stairs, and LBB's cubic. Each is fitted to all
        sizes but one and foretells that one, for each size in turn; a parameter more has to
        foretell 15 % better. Right from some eight sizes on, each measured a few times, with
        three or more past a corner. Two sizes give a line. Keep the cluster's `max_batch_size`
        near the largest size measured: nothing is known past it.

        References:
            M. Stone, *Cross-Validatory Choice and Assessment of Statistical Predictions*, J. Royal
            Statistical Society B 36, 1974. The factor for parameters is ours.
        """
        return best_fit(self.profiles)

    def cubic(self) -> CubicTime:
        """Return LBB's cubic of every worker, in a form that never falls.

        Right for curves that bend gently, from sizes that cover the range. Wrong for corners and
        stairs, and of no use past the largest size, the model's ``most``.

        Raises:
            ValueError: a profile has fewer than four different sizes, or one past 2**20.
        """
        model: CubicTime = fit(CUBIC, self.profiles)
        return model

    def piecewise(self) -> PiecewiseTime:
        """Return LB-BSP's curve of GPUs, flat and then a line.

        Right with two sizes or more on either side of the knee. With one, the knee may stand
        anywhere between it and the next.

        Raises:
            ValueError: a profile has fewer than three different sizes.
        """
        model: PiecewiseTime = fit(PIECEWISE, self.profiles)
        return model

    def to_json(self) -> str:
        """Return it as one line of JSON, every float to its last bit.

        It is an object of ``"schema": "evenstep.cluster-profile"``, ``"version": 1`` and the
        arguments as lists, each profile an object of its own arguments.
        """
        profiles = [
            {name: getattr(each, name) for name in ("sizes", "seconds", "peak_bytes")}
            for each in self.profiles
        ]
        record = {"schema": SCHEMA, "version": VERSION, "profiles": profiles}
        record |= {name: getattr(self, name) for name in FIELDS if name != "profiles"}
        return json.dumps(record, default=np.ndarray.tolist)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what ``to_json`` wrote.

        Raises:
            ValueError: the text is no JSON, nothing of this kind, of a newer version, or its
                values are none that a profile may have.
        """
        record = _read(text)
        for name in ("workers", "profiles", "capacity_bytes", "out_of_memory"):
            if not isinstance(record[name], list):
                got, remedy = repr(record[name])[:60], "Give what `to_json` returned."
                raise invalid(f"ClusterProfile({name}=...)", "be a list", got, remedy)
        try:
            profiles = [Profile(**each) for each in record.pop("profiles")]
        except TypeError as error:  # no object, or one with other fields
            rule, remedy = "hold the arguments of `Profile`s", "Give what `to_json` returned."
            raise invalid("ClusterProfile(profiles=...)", rule, error, remedy) from error
        return cls(record.pop("workers"), profiles, **record)

    def _table(self, values: Sequence[Any], merge: Any, missing: float) -> FloatArray:
        """Return one row per size and one column per worker, repeats merged."""
        sizes = self.sizes
        table = np.full((len(sizes), self.world_size), missing, np.float64)
        for rank, (profile, value) in enumerate(zip(self.profiles, values, strict=True)):
            measured = np.broadcast_to(value, profile.sizes.shape)
            for size in np.unique(profile.sizes):
                row = np.searchsorted(sizes, size)
                table[row, rank] = merge(measured[profile.sizes == size])
        return table


def _per_worker(argument: str, value: Any, world_size: int) -> IntArray:
    """Return the integers as a read-only array of our own, 0 for None."""
    try:
        given = np.asarray(np.zeros(world_size, np.int64) if value is None else value)
    except (ValueError, TypeError, OverflowError):
        given = np.empty((), object)  # ragged, say
    if given.shape != (world_size,) or given.dtype.kind not in "iu" or (given < 0).any():
        raise invalid(
            f"ClusterProfile({argument}=...)",
            f"be {world_size} integers of at least 0, one for each of `workers`",
            repr(value)[:60],
            "Give 0 for a worker of which it is not known.",
        )
    return own(given, np.int64)


def _read(text: str) -> dict[str, Any]:
    """Return the fields in ``text``, its schema and their names checked, their values not yet."""
    name, remedy = "ClusterProfile.from_json(text=...)", "Give what `to_json` returned."
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(name, "be JSON", f"{text[:60]!r} ({error})", remedy) from error
    found = record if isinstance(record, dict) else {}
    if found.pop("schema", None) != SCHEMA:
        raise invalid(name, f'be an object of `"schema": "{SCHEMA}"`', repr(record)[:60], remedy)
    version = found.pop("version", None)
    if type(version) is not int or not 1 <= version <= VERSION:
        rule = f"be of a version from 1 to {VERSION}"
        raise invalid(name, rule, repr(version)[:60], "Upgrade evenstep, or profile anew.")
    if odd := sorted(found.keys() ^ set(FIELDS)):
        rule = f"hold {sorted(FIELDS)} and nothing else"
        raise invalid(name, rule, f"{odd} missing or unknown", remedy)
    return found
