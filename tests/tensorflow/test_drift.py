"""What workers say of the samples that they have read, and what is refused of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from evenstep.tensorflow._source import Tally, check_same_samples


def tallies(*workers, epochs=1, repeats=True, step_size=7):
    """What each worker says of the last of some epochs, of functions from its number to samples."""
    said = []
    for samples in workers:
        tally = Tally(repeats=repeats)
        for epoch in range(epochs):
            tally.begin()
            every = list(samples(epoch))
            for first in range(0, len(every), step_size):
                step = every[first : first + step_size]
                tally.add(tf.nest.map_structure(lambda *parts: stacked(parts), *step))
        said.append(tally.rows())
    return json.loads(json.dumps(said))


def stacked(parts):
    """As `tf.data` gives them: texts are objects."""
    texts = isinstance(parts[0], (bytes, str))
    return np.array(parts, object) if texts else np.stack(parts)


def in_order(epoch):
    return list(zip(NUMBERS, NUMBERS % 3, strict=True))


def the_other_way(epoch):
    return in_order(epoch)[::-1]


def others(epoch):
    return [(x + 100, y) for x, y in the_other_way(epoch)]


def random(epoch):
    return [(np.random.default_rng().normal(), y) for _, y in in_order(epoch)]


def labelled(samples):
    return lambda epoch: [(x, x, i) for i, (x, _) in enumerate(samples(epoch))]


def others_labelled(epoch):
    return labelled(random)(epoch)[::-1]


NUMBERS = np.arange(20)


@pytest.mark.parametrize(
    ("workers", "options", "said"),
    [
        ([in_order, in_order, the_other_way], {}, r"another order on ranks 0, 1 \| rank 2"),
        ([in_order, the_other_way, others], {}, r"another order on rank 0 \| rank 1 \| rank 2"),
        ([in_order, others], {"epochs": 2}, r"other samples on rank 0 \| rank 1"),
        ([in_order, others], {}, None),  # nobody knows yet that they are no augmentation
        ([in_order, others], {"epochs": 2, "repeats": False}, None),  # a cached one, perhaps
        ([in_order, in_order], {"epochs": 2}, None),
        ([random, random], {"epochs": 2}, None),
        ([random, in_order], {"epochs": 2}, None),
        ([labelled(random), labelled(the_other_way)], {"epochs": 2}, None),
        ([labelled(random), others_labelled], {}, r"another order on rank 0 \| rank 1"),
        ([lambda epoch: [0] * 9 + [1], lambda epoch: [1] + [0] * 9], {}, None),
    ],
)
def test_what_is_certain_is_refused_and_nothing_else(workers, options, said):
    """The same values in another order, or values that come again and others do not have."""
    if said is None:
        check_same_samples(tallies(*workers, **options))
    else:
        with pytest.raises(ValueError, match=said):
            check_same_samples(tallies(*workers, **options))


def test_the_size_of_steps_says_nothing():
    """Checksums are those of the samples, however they were stacked."""
    assert tallies(in_order, step_size=3) == tallies(in_order, step_size=20)


@pytest.mark.parametrize(
    "sample",
    [(b"text", "text"), {"large": np.ones((64, 64, 3)), "small": np.float32(1)}, np.zeros(0)],
)
def test_all_kinds_of_samples_have_checksums(sample):
    """Texts, large ones and empty ones, the same for the same."""
    (first,), (again,) = tallies(lambda epoch: [sample]), tallies(lambda epoch: [sample])

    assert first == again
