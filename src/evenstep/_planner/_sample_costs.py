"""What samples cost, as a user says it and as plans read it, and who gets which of a step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index
from typing import Any, final

import numpy as np

from .._types import IntArray, check_fields, fill
from ..exceptions import invalid
from ..solve import Assignment, Forwards, WorkerCosts, partition

MOST_LENGTH = 1 << 24  # the squares of 16,384 such samples still add up in 64 bits


def field_of(dataset: Any, name: str) -> Any:
    """Return the numbers under ``name``, or how long the lists there are, by index.

    A column is read as such; of a ``Subset``, the rows that it has. A field that only samples have
    is read from all of them, one after the other.

    Args:
        dataset: read by index; with ``column_names``, by the name of a column too.
        name: of a column or, where samples are mappings, of one of their fields.

    Raises:
        ValueError: there is neither.
    """
    inner, indices = whole_of(dataset)
    names = getattr(inner, "column_names", None)
    if isinstance(names, list) and name in names:
        values = _lengths(inner[name])
        return values if indices is None else values[indices]
    first = None
    with suppress(KeyError, TypeError, IndexError):  # of columns alone, or without samples
        first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        there = names or (list(first) if isinstance(first, Mapping) else "no columns")
        raise invalid(
            "Balancer(cost=...)",
            "name a column of the data set, or a field of its samples",
            f"{name!r} for a {type(inner).__name__} with {there}",
            "Give an array with a length for each index, or, of a field that the collator makes, "
            "`Cost(from_batch=...)`.",
        )
    return _lengths(dataset[index][name] for index in range(len(dataset)))


def batch_lengths(of: Any, samples: Sequence[Any], collate: Callable[[Any], Any]) -> Any:
    """Return a batch of samples, and the length of each.

    Args:
        of: the name of a field of the samples or, where they have none, of the batch; there it is
            of lengths, of lists, or of masks with a 1 for each token. Or a function of both.
        samples: at least one.
        collate: makes a batch of them; it may change them.

    Raises:
        ValueError: there is no such field, or its values are no lengths.
    """
    lengths: Any = None
    if isinstance(of, str) and isinstance(samples[0], Mapping) and of in samples[0]:
        lengths = [_length(sample[of]) for sample in samples]
    batch = collate(samples)
    if lengths is None:
        lengths = _of_field(of, batch) if isinstance(of, str) else of(samples, batch)
    found = np.asarray(lengths)
    is_whole = found.dtype.kind in "iu" and found.shape == (len(samples),)
    if not is_whole or found.min() < 0 or found.max() > MOST_LENGTH:
        limits = f" from {found.min()} to {found.max()}" if is_whole else ""
        raise invalid(
            "Cost(from_batch=...)",
            f"give an integer from 0 to {MOST_LENGTH} for each of the {len(samples)} samples of a "
            f"batch",
            f"{found.dtype} of shape {found.shape}{limits}",
            "Count the tokens of each sample, or in thousands what there is more of.",
        )
    return batch, found.astype(np.int64)


def sample_length(of: Any, sample: Any) -> int:
    """Return the length of one sample of a stream.

    Args:
        of: the name of a field, of a length or a list; or a function of the sample.
        sample: as the stream yields it.

    Raises:
        ValueError: there is no such field, or it is no length.
    """
    if not callable(of) and not (isinstance(sample, Mapping) and of in sample):
        raise invalid(
            "Balancer(cost=...)",
            "name a field of each sample of a stream",
            f"{of!r} for a {type(sample).__name__}"
            + (f" with {sorted(map(str, sample))}" if isinstance(sample, Mapping) else ""),
            "Have the stream yield mappings with that field, or give a function of a sample.",
        )
    found = of(sample) if callable(of) else _length(sample[of])
    with suppress(TypeError):
        if 0 <= index(found) <= MOST_LENGTH:
            return index(found)
    raise invalid(
        "Balancer(cost=...)",
        f"give an integer from 0 to {MOST_LENGTH} for each sample of a stream",
        repr(found)[:80],
        "Count tokens, pixels or nodes, in thousands where they are many.",
    )


def _of_field(name: str, batch: Any) -> Any:
    if not isinstance(batch, Mapping) or name not in batch:
        raise invalid(
            "Cost(from_batch=...)",
            "name a field of the samples, or of their batch",
            f"{name!r} for a batch with {list(batch) if isinstance(batch, Mapping) else 'none'}",
            "Give a function of the samples and their batch.",
        )
    values = batch[name]
    if getattr(values, "ndim", 1) != 2:
        return _lengths(values)
    rows = np.asarray(values)
    if rows.dtype.kind not in "iub" or rows.min() < 0 or rows.max() > 1:
        raise invalid(
            "Cost(from_batch=...)",
            "name lengths, lists, or a mask with a 1 for each token",
            f"{name!r}, whose rows are filled up",
            'Name the mask, such as "attention_mask", or give a function.',
        )
    return rows.sum(axis=1)


def whole_of(dataset: Any) -> tuple[Any, IntArray | None]:
    """Return what a ``Subset`` is of, and its rows; None are all of them."""
    indices: IntArray | None = None
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        own = np.asarray(dataset.indices, np.int64)
        indices = own if indices is None else own[indices]
        dataset = dataset.dataset
    return dataset, indices


def _lengths(values: Any) -> Any:
    """Return numbers as they are, of lists how long they are."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values
    return np.array([_length(value) for value in values])


def _length(value: Any) -> Any:
    # Of a list without a look at its items, which `np.ndim` would copy.
    return value if not isinstance(value, list | tuple) and np.ndim(value) == 0 else len(value)


UNKNOWN = -1
_MOST_FEATURE = 1 << 48  # of which 16,384 do, too
_ROOM = 2  # times the longest sample of the first epoch: later ones are seldom longer


@final
@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    r"""What samples cost: by their lengths, or by features of your own.

    With lengths $L$, a sample costs $f_0 + f_1 L + f_2 L^2$; with features $x$, it costs
    $f_0 + f \cdot x$. You do not set $f$ or the speeds of the ranks: they are fitted to the times
    of training steps, beginning with $L$ alone.

    Right where costs add up over the samples of a forward (packed or unpadded text, pixels of
    images in a list, nodes and edges of graphs), or, with ``padded``, where every sample of a
    forward takes as long as its longest one. A wrong length costs speed, and nothing else: the
    gradient does not depend on which rank computes a sample.

    Usage:
        Balancer(cost="length")  # a column of a Hugging Face data set
        Balancer(cost="input_ids")  # one of lists, by their lengths
        Balancer(cost=[len(text) for text in texts])  # short for Cost([...])
        Balancer(cost=Cost(from_batch="input_ids"))  # as they are read: the collator tokenizes

    Attributes:
        of: lengths by index, ``(num_samples,)``, from 0 to 2**24; or features,
            ``(num_samples, num_features)``, one to six of them, from 0 to 2**48; integers. Or the
            name of a column of lengths, or of lists, whose lengths count, such as
            ``"input_ids"``; without such a column, it is the name of a field of each sample, and
            the whole data set is read once. Or a function from an index to its length, which is
            called once for each sample. For a stream, the name of a field of each sample, or a
            function of a sample.
        padded: whether the collator pads the samples of a forward to the longest. With None,
            evenstep finds out: it shows the collator some samples before training.
        max_size: largest size of one forward: the sum of the lengths, or, if samples are padded,
            the longest length times their number; of features, the first one counts. None is no
            limit. For loops over ``loader.steps()``, which may make several forwards.
        max_samples: most samples of one forward, in the same loops; None is no limit.
        from_batch: instead of ``of``, if lengths become known only when samples are read: the name
            of a field of each sample, or of the batch, such as ``"attention_mask"``; or a function
            that gets the collator's samples and its batch, and returns the length of each sample.
            In the first epoch, plans count samples.
    """

    of: Any = None
    padded: bool | None = None
    max_size: int | None = None
    max_samples: int | None = None
    from_batch: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("max_size", "max_samples"):
            if getattr(self, name) is not None:
                check_fields(self, **{name: ("an integer of at least 1", "None is no limit.")})
        if self.from_batch is not None:
            self._check_from_batch()
        elif not isinstance(self.of, str) and not callable(self.of):
            fill(self, of=_checked(self.of, padded=self.padded))

    @classmethod
    def given(cls, value: Any) -> Cost | None:
        """Return the argument of ``Balancer(cost=...)`` as a ``Cost``; None stays None."""
        return value if value is None or isinstance(value, cls) else cls(value)

    @property
    def is_capped(self) -> bool:
        """Whether a rank may need several forwards for its samples."""
        return self.max_size is not None or self.max_samples is not None

    @property
    def is_one_for_all(self) -> bool:
        """Whether all samples are known to cost the same, and forwards have no caps."""
        table = self.of
        if not isinstance(table, np.ndarray) or self.is_capped:
            return False
        return bool((table.max(axis=0) == table.min(axis=0)).all())

    def __repr__(self) -> str:
        """Return what is equal on ranks that mean the same."""
        of = self.of if self.from_batch is None else self.from_batch
        if isinstance(of, np.ndarray):
            kind, checksum = "lengths" if of.ndim == 1 else "features", zlib.crc32(of.tobytes())
            of = f"<{kind} of {len(of)} samples, checksum {checksum:#010x}>"
        elif callable(of):
            of = getattr(of, "__qualname__", type(of).__name__)
        caps = f", max_size={self.max_size}, max_samples={self.max_samples}"
        where = "" if self.from_batch is None else "from_batch="
        return f"Cost({where}{of}, padded={self.padded}{caps if self.is_capped else ''})"

    def _check_from_batch(self) -> None:
        if self.of is not None:
            rule, remedy = "be left out with `from_batch`", "Give one of the two."
            raise invalid("Cost(of=...)", rule, self.of, remedy)
        if not isinstance(self.from_batch, str) and not callable(self.from_batch):
            raise invalid(
                "Cost(from_batch=...)",
                "name a field, or be a function of samples and their batch",
                self.from_batch,
                "Lengths that are known before training are `Cost(lengths)`.",
            )
        if self.max_size is not None:
            raise invalid(
                "Cost(max_size=...)",
                "be left out with `from_batch`, as a forward is cut before lengths are known",
                self.max_size,
                "Use `max_samples`, or give the lengths before training.",
            )

    def suits(self, dataset: Any) -> bool:
        """Return whether it names a column that ``dataset`` has."""
        names = getattr(whole_of(dataset)[0], "column_names", None)
        return isinstance(self.of, str) and isinstance(names, list) and self.of in names

    def read(self, dataset: Any) -> Cost:
        """Return a copy with the costs of ``dataset``'s samples in place of a name or function.

        With ``from_batch`` it returns itself.

        Raises:
            ValueError: nothing in the data set has that name, or it is not one length for each
                sample.
        """
        found, values = self, self.of
        if self.from_batch is not None:
            return self
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
        if self.from_batch is not None:
            return SampleCosts(self, np.full(len(dataset), UNKNOWN, np.int32))
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

    A sample whose length is not known counts as the mean one. Any thread may read while one
    corrects lengths.

    Args:
        cost: as it was given.
        table: lengths or features of all samples, which is kept and not copied; ``UNKNOWN`` is a
            length that is not known yet.

    Attributes:
        cost: likewise.
        num_features: of a sample.
        most, mean: the largest of each, and the mean one, ``(num_features,)``. Where lengths become
            known in time, the largest that ones to come are counted as.
        is_known: whether any length is known.
        differ: whether samples differ in what is known of them.
    """

    def __init__(self, cost: Cost, table: IntArray) -> None:
        self.cost = cost
        self._table = table
        self._grows = not isinstance(cost.of, np.ndarray)  # lengths become known in time
        self.num_features = 3 if table.ndim == 1 else 1 + table.shape[1]
        self.is_known = self.differ = False
        self.most, self.mean = np.ones(self.num_features, np.int64), np.ones(self.num_features)
        self._sum_up()

    @property
    def lengths(self) -> IntArray:
        """Those of all samples, not to be changed; ``UNKNOWN`` where that is so."""
        return self._table

    def features(self, indices: IntArray) -> IntArray:
        """Return the features of some samples, ``(len(indices), num_features)``."""
        own = self._table[indices]
        if own.ndim == 2:
            return np.concatenate([np.ones((len(own), 1), np.int64), own], axis=1)
        if self.cost.from_batch is not None:
            own = np.where(own == UNKNOWN, np.rint(self.mean[1]), own)
            own = np.minimum(own, self.most[1])
        return of_lengths(own)

    def correct(self, indices: IntArray, lengths: IntArray) -> None:
        """Take in lengths of some samples. Of an index that repeats, the last one counts."""
        self._table[indices] = lengths
        self._sum_up()

    def _sum_up(self) -> None:
        table, was_known = self._table, self.is_known
        if self._grows:
            table = table[table != UNKNOWN]
        if not len(table):
            return
        top, mean = table.max(axis=0), table.mean(axis=0)
        self.differ = bool(np.any(top != table.min(axis=0)))
        if table.ndim == 2:
            self.most, self.mean = np.array([1, *top], np.int64), np.array([1, *mean])
        else:
            self.mean = np.array([1, mean, np.square(table, dtype=np.float64).mean()])
            if not was_known:  # plans are rounded by it, and some may be on their way
                top = int(top) * (_ROOM if self._grows else 1)
                self.most = np.array([1, top, top**2], np.int64)
        self.is_known = True

    def sizes(self, features: IntArray) -> IntArray:
        """Return how much of a forward's size each of its samples makes up, ``(num_samples,)``.

        Its length, or where samples are padded that of the longest one.
        """
        own = features[:, 1]
        return np.full_like(own, own.max(initial=0)) if self.cost.padded else own

    def forwards(
        self,
        features: IntArray,
        *,
        most: int | None,
        equal: bool,
        empty: bool = False,
        max_size: IntArray | int | None = None,
    ) -> Forwards:
        """Return how samples are cut into forwards, within the caps of ``Cost``.

        Args:
            features: of the samples.
            most: samples of a forward, beside those caps; None is no limit.
            equal: whether all ranks make as many.
            empty: whether some of those may have no sample.
            max_size: of each rank's forwards, ``(world_size,)``; None is that of ``Cost``.
        """
        max_size = self.cost.max_size if max_size is None else max_size
        caps = [cap for cap in (self.cost.max_samples, most) if cap is not None]
        return Forwards(
            max_samples=min(caps, default=None),
            size=None if max_size is None else features[:, 1],
            max_size=max_size,
            equal=equal,
            empty=empty,
        )

    def start(self) -> IntArray:
        """Return the weights of features before any is measured, ``(num_features,)``.

        Lengths begin with L alone, and with counts while none is known. Features of one's own begin
        alike, by their mean.
        """
        if not self.is_known:
            return np.array([1, 0, 0])
        if self._table.ndim == 1:
            return np.array([0, 1, 0])
        mean = np.maximum(self.mean[1:], 1e-9)
        return np.array([0, *np.rint(1000 * mean.max() / mean)]).astype(np.int64)

    def total(self, forwards: Sequence[IntArray]) -> tuple[int, ...]:
        """Return the features of forwards; of padded ones, their longest sample's for each."""
        total = np.zeros(self.num_features, np.int64)
        for features in forwards:
            if len(features) and self.cost.padded:
                total += features.max(axis=0) * len(features)
            else:
                total += features.sum(axis=0)
        return tuple(total.tolist())


def of_lengths(lengths: IntArray) -> IntArray:
    """Return the features of samples with these lengths, ``(len(lengths), 3)``."""
    own = lengths.astype(np.int64)
    return np.stack([np.ones(len(own), np.int64), own, own * own], axis=1)


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
    limit = MOST_LENGTH if table.ndim == 1 else _MOST_FEATURE
    if table.max() > limit:
        raise invalid(
            "Cost(of=...)",
            f"be at most {limit}, so that a whole batch can be added up",
            int(table.max()),
            "Count in a larger unit, such as thousands: what a unit costs is learnt.",
        )
    # Beside int64 they would become floats; others stay as they are, which may be on a disk.
    return table.astype(np.int64) if table.dtype == np.uint64 else table


def assign(
    costs: SampleCosts,
    features: IntArray,
    workers: WorkerCosts,
    *,
    caps: Sequence[int] | None = None,
    whole: bool = False,
    equal_forwards: bool = False,
) -> Assignment:
    """Return who computes which samples of a step, and in which forward.

    Args:
        costs: of the data set.
        features: of the samples, ``(num_samples, num_features)``.
        workers: what those cost each worker.
        caps: size of a forward that fits on every worker; None is no limit beside that of ``Cost``.
            Where the samples do not fit so, forwards may grow, an eighth at a time, until they do:
            all samples are computed.
        whole: whether every worker has a single forward.
        equal_forwards: whether all workers make as many forwards, where samples suffice.
    """
    num_samples, world_size, fewer = len(features), workers.world_size, None
    equal = equal_forwards and num_samples >= 2 * world_size
    if equal:  # in one forward each they do not fit: the last one's time is not known
        fewer = -(-num_samples // world_size) - 1
    split = partial(partition, features, fitted(workers, features), padded=bool(costs.cost.padded))
    forwards = partial(costs.forwards, features, most=fewer)
    sizes = features[:, 1]
    most = costs.cost.max_size or num_samples * int(sizes.max())
    for room in () if caps is None else _rooms(np.array(caps), most, sizes):
        few = whole and num_samples < world_size
        within = forwards(equal=equal or whole, empty=few, max_size=room)
        with suppress(ValueError):  # there may be no way with so many samples
            found = split(forwards=within)
            if not whole or found.num_forwards.max() == 1:
                return found
    return split(forwards=forwards(equal=equal))


def fitted(workers: WorkerCosts, features: IntArray) -> WorkerCosts:
    """Return workers in a unit in which a step's samples can be partitioned, each at some cost.

    Those that cost nothing would all go to one worker, whose forward then has most of the step: of
    length 0, or rounded away beside what is far larger. They count as one unit each.

    Args:
        workers: rounded for another data set, perhaps.
        features: of the samples, of which the first is 1, ``(num_samples, num_features)``.
    """
    found = workers.fitting(features)
    counts = np.unique(found.slope > 0, axis=0)
    if all(features[:, one].any(axis=1).all() for one in counts):
        return found
    slope = found.slope.copy()
    slope[:, 0] = np.maximum(slope[:, 0], 1)
    return WorkerCosts(slope, found.intercept)


def _rooms(caps: IntArray, most: int, sizes: IntArray) -> Iterator[IntArray]:
    """Yield sizes of a forward on every worker, ``(world_size,)``: the caps, then more and more.

    Samples that are larger than all caps go to the workers with the largest ones: at most as many
    workers, with caps that differ by less than a quarter.
    """
    room = np.minimum(caps, most)
    top = int(room.max())
    larger = np.count_nonzero(sizes > top)
    takers = np.argsort(-room, kind="stable")[:larger]
    room[takers[4 * room[takers] > 3 * top]] = sizes.max()
    while (room < most).any():
        yield room
        room = np.minimum(room + room // 8 + 1, most)
