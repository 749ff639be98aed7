"""Where samples come from: arrays, read by position, or a pipeline, read by every worker.

Checksums of every epoch show whether all workers read the same samples in the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import tensorflow as tf

from .._exchange._world_check import listed
from .._types import IntArray
from ..exceptions import invalid

_refused = partial(invalid, "Balancer.dataset(source)")

_VARIED = 8  # distinct values from which on a part of the samples says something of their order
_ELEMENTS = 256  # of a part that a checksum is of, spread over it

Row = list[Any]  # of a part: checksum in order, checksum in any order, is it varied, is it steady


class Tally:
    """Checksums of the samples that this worker has read in an epoch, one row for each part.

    Args:
        repeats: whether a part that is the same in two epochs is so because the pipeline makes no
            random content, and not because it keeps what it has made.
    """

    def __init__(self, *, repeats: bool) -> None:
        self._repeats = repeats
        self._before: list[int] = []
        self._parts: list[tuple[int, int, set[int]]] = []

    def begin(self) -> None:
        """Begin an epoch."""
        self._before = [in_any_order for _, in_any_order, _ in self._parts]
        self._parts = []

    def add(self, samples: Any) -> None:
        """Count samples, stacked and nested as the user's."""
        parts = tf.nest.flatten(samples)
        if not self._parts:
            self._parts = [(0, 0, set()) for _ in parts]
        for place, part in enumerate(parts):
            in_order, in_any_order, distinct = self._parts[place]
            rows = _bytes(part)
            each = list(map(zlib.crc32, rows))
            in_order = zlib.crc32(b"".join(rows) if isinstance(rows, list) else rows, in_order)
            in_any_order += sum(each)
            if len(distinct) < _VARIED:
                distinct.update(each)
            self._parts[place] = in_order, in_any_order, distinct

    def rows(self) -> list[Row]:
        """Return a row for each part: plain values, for ``check_same_samples``."""
        return [
            [
                in_order,
                in_any_order,
                len(distinct) >= _VARIED,
                self._repeats and self._before[place : place + 1] == [in_any_order],
            ]
            for place, (in_order, in_any_order, distinct) in enumerate(self._parts)
        ]


def check_same_samples(reported: Sequence[list[Row]]) -> None:
    """Raise if workers have certainly read other samples than each other, or in another order.

    Of one part of the samples the same values in another order say so, or values that each worker
    finds again in every epoch and the others do not have. What else differs is content drawn at
    random, as by augmentation, and every worker may draw its own. A part that is the same in order
    on all workers shows that they are in step, and so do none with hardly any distinct values.

    Raises:
        ValueError: they have; the message names the ranks.
    """
    for kind, groups in _findings(reported):
        raise _refused(
            "be a pipeline that gives the same samples in the same order on all workers",
            f"{kind} on {' | '.join(map(listed, groups))} in this epoch",
            "Iterate over it, or peek into it, on all workers or on none, as each iteration may "
            "shuffle anew; or give a function from the epoch's number to a pipeline. Read files in "
            "a fixed order, and shard nothing.",
        )


def _findings(reported: Sequence[list[Row]]) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield what differs, and the ranks in groups of those who agree."""
    parts = [
        part
        for part in zip(*reported, strict=True)
        if all(is_varied for _, _, is_varied, _ in part)
    ]
    if any(len({in_order for in_order, *_ in part}) == 1 for part in parts):
        return
    for part in parts:
        contents = {in_any_order for _, in_any_order, *_ in part}
        if len(contents) < len({(in_order, content) for in_order, content, *_ in part}):
            yield "another order", _groups([in_order for in_order, *_ in part])
        elif len(contents) > 1 and all(is_steady for *_, is_steady in part):
            yield "other samples", _groups([content for _, content, *_ in part])


def _groups(values: Sequence[int]) -> list[list[int]]:
    return [
        [rank for rank, value in enumerate(values) if value == each]
        for each in dict.fromkeys(values)
    ]


def _bytes(part: Any) -> Any:
    """Return a part of each sample as bytes, thinned out if it is large: an array, or a list."""
    rows = np.asarray(part)
    if rows.dtype == object:  # texts
        return [repr(row).encode() for row in rows.tolist()]
    flat = rows.reshape(len(rows), -1)
    thin = flat[:, :: -(-flat.shape[1] // _ELEMENTS) or 1]
    return np.ascontiguousarray(thin).view(np.uint8)


_BATCHED = ("Batch", "Rebatch")  # in the names of the stages that make batches
_PASSING = ("Options", "Prefetch", "Repeat", "Take", "Skip", "Cache", "AssertCardinality")
_STEPS_AHEAD = 2
# TensorFlow takes about a millisecond to hand over a block of rows, however small. Several steps of
# small samples are one block.
_MOST_STEPS, _MOST_BYTES = 4, 1 << 18


@final
class ArraySource:
    """Samples of an epoch in one global order: rows of arrays, by a seed and the epoch's number.

    Attributes:
        num_samples: of an epoch.
        signature: of one sample, nested as the user's.
        order: what draws the order, in words: the same for the same order.
        content: what the samples are, in words: the same for the same samples, as far as that is
            known without reading them all.

    Raises:
        ValueError: the arrays have no rows, or not as many.
    """

    def __init__(self, arrays: Any, *, shuffle: bool, seed: int) -> None:
        self._arrays = tf.nest.map_structure(np.asarray, _tuples(arrays))
        flat = tf.nest.flatten(self._arrays)
        lengths = {len(array) if array.ndim else 0 for array in flat}
        if len(lengths) != 1 or not min(lengths, default=0) or flat[0].dtype == object:
            raise _refused(
                "be arrays with as many rows each, or a `tf.data.Dataset` of single samples",
                sorted(lengths) or type(arrays).__name__,
                "Turn what has a length and an index into a `tf.data.Dataset`, or pad its rows.",
            )
        self.num_samples = lengths.pop()
        self.signature = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], array.dtype), self._arrays
        )
        self._shuffle = shuffle
        self._seed = seed
        self.order = f"shuffled by seed {seed}" if shuffle else "the order of the rows"
        self.content = f"{self.signature}, checksum {_checksum(flat, self.num_samples):#010x}"
        self._order = np.arange(self.num_samples)
        self._first = self._step_size = 0

    def begin(self, epoch: int, first: int, *, num_samples: int) -> None:
        """Begin ``epoch`` at position ``first``, to be taken ``num_samples`` at a time."""
        self._first, self._step_size = first, num_samples
        if self._shuffle:
            generator = np.random.default_rng([self._seed, epoch])
            self._order = generator.permutation(self.num_samples)

    def take(self, slots: IntArray) -> Any:
        """Return some of the next step's samples, stacked and nested as the user's.

        Args:
            slots: which of them are wanted, ascending; a short last step has fewer of them.
        """
        rows = self._order[self._first + slots]
        self._first += self._step_size
        return tf.nest.map_structure(lambda array: array[rows], self._arrays)

    def end(self) -> None:
        """Return nothing: all workers have the same samples for sure."""


@final
class PipelineSource:
    """As ``ArraySource``, of a pipeline that every worker reads whole, to keep its own samples.

    Whole global steps are put together by TensorFlow, some of them ahead: they have the same
    samples under any plan, and own ones are cut out when it is known. Several steps are read at
    once if their samples are small.

    Raises:
        ValueError: it has no length, or makes batches.
    """

    def __init__(self, pipeline: Any) -> None:
        self._make: Callable[[int], Any] = pipeline
        if _is_dataset(pipeline):
            self._make = lambda epoch: pipeline
        first = self._checked(0)
        self.num_samples = _length(first)
        self.signature = first.element_spec
        seeds = [tuple(map(int, stage)) for stage in map(_seeds, _stages(first)) if stage]
        self.order = f"the order of the pipeline, with the seeds {seeds}"
        self.content = str(self.signature)
        kept = any("Cache" in type(stage).__name__ for stage in _stages(first))
        self._tally = Tally(repeats=not kept)
        self._blocks: Iterator[Any] = iter(())
        self._block: Any = None
        self._first = self._num_rows = self._step_size = 0  # rows of the block

    def begin(self, epoch: int, first: int, *, num_samples: int) -> None:
        """Begin ``epoch`` likewise."""
        pipeline = self._checked(epoch)
        if _length(pipeline) != self.num_samples:
            raise _refused(
                f"return equally many samples for every epoch, {self.num_samples}",
                f"{_length(pipeline)} for epoch {epoch}",
                "Other data is for another run, with a `Balancer` of its own.",
            )
        num_steps = _steps_in_a_block(self.signature, num_samples)
        blocks = pipeline.skip(first).batch(num_steps * num_samples).prefetch(_STEPS_AHEAD)
        self._blocks = blocks.as_numpy_iterator()
        self._first = self._num_rows = 0
        self._step_size = num_samples
        self._tally.begin()

    def take(self, slots: IntArray) -> Any:
        """Return some of the next step's samples likewise."""
        if self._first >= self._num_rows:
            self._block = next(self._blocks)
            self._first, self._num_rows = 0, len(tf.nest.flatten(self._block)[0])
            self._tally.add(self._block)
        block, rows = self._block, self._first + slots
        self._first += self._step_size
        if self._first >= self._num_rows:
            self._block = None  # a large step is not to stay in memory while it is trained on
        return tf.nest.map_structure(lambda part: part[rows], block)

    def end(self) -> list[Row]:
        """Return checksums of the whole epoch."""
        for left_out in self._blocks:  # by `drop_remainder`
            self._tally.add(left_out)
        return self._tally.rows()

    def _checked(self, epoch: int) -> tf.data.Dataset:
        pipeline = self._make(epoch)
        _length(pipeline)
        _check_single(pipeline)
        _check_dense(pipeline)
        _check_seeded(pipeline)
        return pipeline


Source = ArraySource | PipelineSource


def source_of(source: Any, *, shuffle: bool, seed: int) -> Source:
    """Return the source that ``source`` stands for.

    Raises:
        ValueError: it is of another type.
    """
    if not (_is_dataset(source) or callable(source)):
        return ArraySource(source, shuffle=shuffle, seed=seed)
    if shuffle:
        raise invalid(
            "Balancer.dataset(shuffle=...)",
            "be False for a pipeline",
            shuffle,
            "Write `.shuffle(size, seed=...)`: with a seed, all workers draw the same order.",
        )
    return PipelineSource(source)


def _steps_in_a_block(signature: Any, num_samples: int) -> int:
    """Return how many steps are read at once: several if their samples are known to be small."""
    num_bytes = 0
    for spec in tf.nest.flatten(signature):
        if spec.dtype == tf.string or not spec.shape.is_fully_defined():
            return 1
        num_bytes += num_samples * spec.dtype.size * spec.shape.num_elements()
    return max(1, min(_MOST_STEPS, _MOST_BYTES // max(num_bytes, 1)))


def _is_dataset(source: Any) -> bool:
    return isinstance(source, tf.data.Dataset)


def _length(pipeline: tf.data.Dataset) -> int:
    if not _is_dataset(pipeline):
        raise _refused(
            "be, or return for an epoch's number, a `tf.data.Dataset`",
            type(pipeline).__name__,
            "Give arrays, a pipeline of single samples, or a function that returns one.",
        )
    length = int(pipeline.cardinality())
    if length < 1:
        named = {-1: "an endless one", -2: "one of unknown length"}.get(length, "an empty one")
        raise _refused(
            "have a length",
            named,
            "Say it by `.apply(tf.data.experimental.assert_cardinality(n))`, and leave `repeat()` "
            "out: epochs are counted here.",
        )
    return length


def _check_single(pipeline: Any) -> None:
    """Raise if the last stages of a pipeline make batches."""
    kinds = [type(stage).__name__ for stage in _stages(pipeline)]
    last = next((kind for kind in kinds if not any(name in kind for name in _PASSING)), "")
    if any(name in last for name in _BATCHED):
        raise _refused(
            "be a pipeline of single samples",
            "one that makes batches",
            "Leave `.batch(...)` out: every worker's batch is sized here.",
        )


def _check_dense(pipeline: tf.data.Dataset) -> None:
    """Raise if samples hold what is no array, of which a step is not cut by rows."""
    for part in tf.nest.flatten(pipeline.element_spec):
        if not isinstance(part, tf.TensorSpec):
            raise _refused(
                "be a pipeline of dense samples, all of one shape",
                type(part).__name__.removesuffix("Spec"),
                "Pad them first, by `ragged.to_tensor()` or `tf.sparse.to_dense(sparse)`.",
            )


def _check_seeded(pipeline: Any) -> None:
    """Raise if a stage of a pipeline draws another order on every worker."""
    for stage in _stages(pipeline):
        seeds = _seeds(stage)
        if seeds and not any(map(int, seeds)):
            raise _refused(
                "be shuffled alike on all workers",
                "a `shuffle` without a seed",
                "Write `.shuffle(size, seed=...)`: each worker keeps its part of one order.",
            )


def _stages(pipeline: Any) -> Iterator[Any]:
    """Yield the stages of a pipeline, the last one first."""
    while pipeline is not None:
        yield pipeline
        pipeline = getattr(pipeline, "_input_dataset", None)


def _seeds(stage: Any) -> tuple[Any, ...]:
    """Return the seeds of a stage that shuffles; nothing of others."""
    if "Shuffle" not in type(stage).__name__:
        return ()
    return tuple(getattr(stage, name, 1) for name in ("_seed", "_seed2"))


def _checksum(arrays: list[Any], num_samples: int) -> int:
    """Return a checksum of the first, the middle and the last rows."""
    total = 0
    for array in arrays:
        for row in (0, num_samples // 2, num_samples - 1):
            total = zlib.crc32(np.ascontiguousarray(array[row]).tobytes(), total)
    return total


def _tuples(nested: Any) -> Any:
    """Return lists as tuples, as `tf.data` has them."""
    if isinstance(nested, dict):
        return {key: _tuples(value) for key, value in nested.items()}
    return tuple(map(_tuples, nested)) if isinstance(nested, (list, tuple)) else nested
