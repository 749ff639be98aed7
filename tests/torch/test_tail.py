"""The short last step on any cluster: all of its samples, and one for everybody where they do."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given

from evenstep._planner import Bounds, Job, Planner
from evenstep.policies import Fixed
from evenstep.torch._data.deal._stream_deal import SameStream, StreamStock

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(lambda sizes: sum(sizes) > 1)


@st.composite
def cases(draw):
    """Local batch sizes of full steps, caps from them on or none, and how many samples are left."""
    sizes = np.array(draw(SIZES))
    room = st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes))
    caps = draw(st.none() | room.map(lambda more: np.maximum(sizes, 1) + more))
    return sizes, caps, draw(st.integers(1, int(sizes.sum()) - 1))


def check(tail, sizes, num_samples):
    """Assert what is promised of a short last step."""
    assert tail.sum() == num_samples
    assert (tail >= 0).all()
    if num_samples >= np.count_nonzero(sizes):
        assert (tail >= np.minimum(sizes, 1)).all()


@given(cases(), st.integers(0, 2))
@example((np.array([1, 19]), np.array([1, 19]), 10), 2)
def test_everybody_with_samples_in_full_steps_has_some_in_the_last(case, smallest):
    """If they suffice. Only a smallest size of 0 lets a full step have a worker without any.

    Caps bind, whatever the models need.
    """
    sizes, caps, num_samples = case
    bounds = Bounds(
        min=tuple(np.minimum(sizes, 1).tolist()),
        max=None if caps is None else tuple(caps.tolist()),
    )
    job = Job(
        len(sizes),
        int(sizes.sum()),
        tail_size=num_samples,
        bounds=bounds,
        tail_smallest=smallest,
    )

    tail = np.array(Planner(Fixed(tuple(sizes.tolist())), job).plan.tail)

    check(tail, sizes, num_samples)
    if caps is not None:
        assert (tail <= caps).all()


@given(SIZES, st.integers(1, 8), st.data())
def test_forwards_of_one_size_stay_whole_where_everybody_can_have_one(counts, granule, data):
    """With fewer forwards than workers, samples are shared out one by one."""
    sizes = np.array(counts) * granule
    num_samples = data.draw(st.integers(1, int(sizes.sum()) - 1))
    smallest = data.draw(st.integers(1, 2))
    job = Job(
        len(sizes),
        int(sizes.sum()),
        tail_size=num_samples,
        bounds=Bounds(min=0, vary="count", granularity=granule),
        tail_smallest=smallest if num_samples >= smallest * len(sizes) else 0,
        cuts=True,
    )

    tail = np.array(Planner(Fixed(tuple(sizes.tolist())), job).plan.tail)

    check(tail, sizes, num_samples)
    if -(-num_samples // granule) >= len(sizes):
        assert np.count_nonzero(tail % granule) <= 1


@given(SIZES, st.data())
def test_the_end_of_a_stream_is_shared_out_likewise(sizes, data):
    """Each rank finds the same numbers for itself."""
    num_samples = data.draw(st.integers(1, sum(sizes) - 1))
    stocks = [StreamStock(num_samples, ended=True, mark=0)] * len(sizes)

    tail = np.array(SameStream(sum(sizes)).sizes(stocks, sizes))

    check(tail, np.array(sizes), num_samples)
