"""What the samples of a data set cost, as a user says it and as plans read it."""

from __future__ import annotations

import zlib
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from .._types import IntArray
from ..exceptions import invalid
from ._fields import field_of, whole_of


@final
@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    r"""What samples cost: by their lengths, or by features of your own.

    With lengths $L$, a sample costs $f_0 + f_1 L + f_2 L^2$; with features $x$, it costs
    $f_0 + f \cdot x$. Nothing has to be set: $f$, and how fast each rank is, are fitted to the
    times of training steps, beginning with $L$ alone.

    Right where costs add up over the samples of a forward (packed or unpadded text, pixels of
    images in a list, nodes and edges of graphs), or, with ``padded``, where every sample of a
    forward takes as long as its longest one. A wrong length costs speed, and nothing else: who
    computes a sample does not change the gradient.

    Usage:
        Balancer(cost="length")  # a column of a Hugging Face data set
        Balancer(cost="input_ids")  # one of lists, by their lengths
        Balancer(cost=[len(text) for text in texts])  # short for Cost([...])

    Attributes:
        of: lengths by index, ``(num_samples,)``; or features, ``(num_samples, num_features)``,
            one to six of them; all integers of at least 0. Or the name of a column of lengths,
            or of lists, whose lengths count, such as ``"input_ids"``; without such a column it is
            looked for in each sample, which reads the whole data set once. Or a function from an
            index to its length, which is called once for each sample.
        padded: whether a collator pads the samples of a forward to the longest. None asks it: it
            is shown two samples before training.
        max_size: most that one forward may have: the sum of the lengths, or where they are padded
            the longest times their number; of features, the first one counts. None is no limit.
            For loops over ``loader.steps()``, which may make several forwards.
        max_samples: most samples of one forward; likewise.
    """

    of: Any
    padded: bool | None = None
    max_size: int | None = None
    max_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_size", "max_samples"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value >= 1):
                raise invalid(f"Cost({name}=...)", "be at least 1", value, "None is no limit.")
        if not isinstance(self.of, str) and not callable(self.of):
            object.__setattr__(self, "of", _checked(self.of, padded=self.padded))

    @classmethod
    def given(cls, value: Any) -> Cost | None:
        """Return what ``Balancer(cost=...)`` was given as a ``Cost``; None is none."""
        return value if value is None or isinstance(value, cls) else cls(value)

    @property
    def is_capped(self) -> bool:
        """Whether one forward may be too small for what a rank gets."""
        return self.max_size is not None or self.max_samples is not None

    def __repr__(self) -> str:
        """Return what is equal on ranks that mean the same."""
        of = self.of
        if isinstance(of, np.ndarray):
            kind, checksum = "lengths" if of.ndim == 1 else "features", zlib.crc32(of.tobytes())
            of = f"<{kind} of {len(of)} samples, checksum {checksum:#010x}>"
        elif callable(of):
            of = getattr(of, "__qualname__", type(of).__name__)
        caps = f", max_size={self.max_size}, max_samples={self.max_samples}"
        return f"Cost({of}, padded={self.padded}{caps if self.is_capped else ''})"

    def suits(self, dataset: Any) -> bool:
        """Return whether it names a column that ``dataset`` has."""
        names = getattr(whole_of(dataset)[0], "column_names", None)
        return isinstance(self.of, str) and isinstance(names, list) and self.of in names

    def read(self, dataset: Any) -> Cost:
        """Return it with what the samples of ``dataset`` cost, in the place of a name or function.

        Raises:
            ValueError: nothing in the data set has that name, or it is not one length for each
                sample.
        """
        found, values = self, self.of
        if not isinstance(values, np.ndarray):
            if isinstance(values, str):
                values = field_of(dataset, values)
            else:
                values = np.array([values(index) for index in range(len(dataset))])
            found = replace(self, of=values)
        if isinstance(dataset, Sized) and len(dataset) != len(found.of):
            raise invalid(
                "Balancer(cost=...)",
                f"have one entry for each of the data set's {len(dataset)} samples",
                len(found.of),
                "Give what belongs to this data set, in the order of its indices.",
            )
        return found

    def table(self, dataset: Any) -> SampleCosts:
        """Return what the samples of ``dataset`` cost.

        Raises:
            ValueError: likewise, or for a sample that is larger than a forward may be.
        """
        found = self.read(dataset)
        table = found.of
        size = table if table.ndim == 1 else table[:, 0]
        if self.max_size is not None and size.max() > self.max_size:
            longest = int(size.argmax())
            raise invalid(
                "Cost(max_size=...)",
                "be at least the size of every sample",
                f"{self.max_size} where sample {longest} has {size[longest]}",
                "Cut the sample, leave it out, or raise the cap.",
            )
        return SampleCosts(found, table)


@final
class SampleCosts:
    """The features of every sample: 1, L and L**2, or 1 and those that were given.

    Args:
        cost: as it was given.
        table: lengths or features of all samples, which is kept and not copied.

    Attributes:
        cost: likewise.
        num_features: of a sample.
        most, mean: the largest of each, and the mean one, ``(num_features,)``.
    """

    def __init__(self, cost: Cost, table: IntArray) -> None:
        self.cost = cost
        self._table = table
        self.num_features = 3 if table.ndim == 1 else 1 + table.shape[1]
        top, mean = table.max(axis=0), table.mean(axis=0)
        if table.ndim == 1:
            self.most = np.array([1, top, top**2], np.int64)
            self.mean = np.array([1, mean, np.square(table, dtype=np.float64).mean()])
        else:
            self.most, self.mean = np.array([1, *top], np.int64), np.array([1, *mean])

    def features(self, indices: IntArray) -> IntArray:
        """Return the features of some samples, ``(len(indices), num_features)``."""
        own = self._table[indices]
        one = np.ones(len(own), np.int64)
        if own.ndim == 1:
            own = own.astype(np.int64)
            return np.stack([one, own, own * own], axis=1)
        return np.concatenate([one[:, None], own], axis=1)

    def start(self) -> IntArray:
        """Return the weights of features before any is measured, ``(num_features,)``.

        Lengths begin with L alone. Features of one's own begin alike, by their mean.
        """
        if self._table.ndim == 1:
            return np.array([0, 1, 0])
        mean = np.maximum(self.mean[1:], 1e-9)
        return np.array([0, *np.rint(1000 * mean.max() / mean)]).astype(np.int64)


def _checked(values: Any, *, padded: bool | None) -> IntArray:
    """Return lengths or features as an array, or raise."""
    try:
        table = np.asarray(values)
    except ValueError:
        table = np.empty((), object)
    good = table.ndim == 1 or (table.ndim == 2 and 1 <= table.shape[1] <= 6 and not padded)
    if not good or not len(table):
        raise invalid(
            "Cost(of=...)",
            "be one length for each sample, or one to six features where nothing is padded",
            f"an array of shape {table.shape}",
            "Give an integer for each index of the data set.",
        )
    if table.dtype.kind not in "iu" or table.min() < 0:
        raise invalid(
            "Cost(of=...)",
            "be integers of at least 0",
            f"{table.dtype}" + ("" if table.dtype.kind not in "iu" else f" from {table.min()} on"),
            "Count tokens, pixels or nodes; round what is no count, in a fine unit.",
        )
    return table
