"""Samples of unlike costs go to unlike workers so that all end together, the same on every rank."""

import subprocess
import sys
from contextlib import nullcontext, suppress
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from evenstep.solve import Forwards, WorkerCosts, partition


@st.composite
def problem(draw, most_samples=40, most_workers=5, padded=False):
    """Lengths with the features L and L**2, and workers of unlike speeds."""
    num_workers = draw(st.integers(1, most_workers))
    length = np.array(draw(st.lists(st.integers(1, 3000), min_size=1, max_size=most_samples)))
    slope = np.array(
        [draw(st.tuples(st.integers(1, 9), st.integers(0, 3))) for _ in range(num_workers)]
    )
    intercept = np.array([draw(st.integers(0, 2000)) for _ in range(num_workers)])
    features = length if padded == "one" else np.stack([length, length**2 // 512], 1)
    return features, WorkerCosts(slope, intercept)


def by_enumeration(features, workers):
    """Return the earliest end over all assignments that leave no worker empty."""
    cost = features @ workers.slope.T
    best = None
    for owner in product(range(workers.world_size), repeat=len(features)):
        if len(set(owner)) < min(workers.world_size, len(features)):
            continue
        load = workers.intercept.copy()
        np.add.at(load, list(owner), cost[np.arange(len(features)), list(owner)])
        best = load.max() if best is None else min(best, load.max())
    return best


def by_integer_program(features, workers):
    """Return a time that no end is before, within 0.5 % of the earliest one, by `milp`.

    One switch per sample and worker, of `scipy.optimize.milp`.
    """
    cost = features @ workers.slope.T
    num_samples, num_workers = cost.shape
    num_switches = num_samples * num_workers
    goal = np.zeros(num_switches + 1)
    goal[-1] = 1
    once = np.zeros((num_samples, num_switches + 1))
    ends = np.zeros((num_workers, num_switches + 1))
    some = np.zeros((num_workers, num_switches + 1))
    for sample, rank in product(range(num_samples), range(num_workers)):
        switch = sample * num_workers + rank
        once[sample, switch] = some[rank, switch] = 1
        ends[rank, switch] = cost[sample, rank]
    ends[:, -1] = -1
    least = 1 if num_samples >= num_workers else 0
    found = milp(
        goal,
        integrality=np.append(np.ones(num_switches), 0),
        bounds=Bounds(0, np.append(np.ones(num_switches), np.inf)),
        constraints=[
            LinearConstraint(once, 1, 1),
            LinearConstraint(ends, -np.inf, -workers.intercept),
            LinearConstraint(some, least, np.inf),
        ],
        options={"mip_rel_gap": 0.005},
    )
    return found.mip_dual_bound


def by_runs(features, workers):
    """Return the earliest end over all runs of the sorted samples and orders of the workers."""
    cost = (features @ workers.slope.T)[np.lexsort(features.T)[::-1]]
    num_samples, num_workers = cost.shape
    least = 1 if num_samples >= num_workers else 0
    best = np.inf
    for order in permutations(range(num_workers)):
        end = np.full(num_samples + 1, np.inf)  # with the first so many samples dealt out
        end[0] = 0
        for rank in order:
            now = np.full(num_samples + 1, np.inf)
            for first, last in product(range(num_samples + 1), repeat=2):
                if last - first >= least:
                    took = workers.intercept[rank]
                    took += (last - first) * cost[first, rank] if last > first else 0
                    now[last] = min(now[last], max(end[first], took))
            end = now
        best = min(best, end[-1])
    return best


def ends(features, workers, assignment, *, padded):
    """When each worker is done, counted sample by sample."""
    features = features.reshape(len(features), -1)
    found = workers.intercept.tolist()
    for rank, slope in enumerate(workers.slope):
        for forward in assignment.samples(rank):
            costs = [int(one) for one in features[forward] @ slope]
            found[rank] += (max(costs) * len(costs) if costs else 0) if padded else sum(costs)
    return found


@given(problem(), st.booleans())
def test_each_sample_is_computed_once_and_loads_are_true(case, padded):
    """By one worker in one forward; no worker goes without one where there are enough."""
    features, workers = case
    found = partition(features, workers, padded=padded)
    dealt = np.concatenate(
        [one for rank in range(workers.world_size) for one in found.samples(rank)]
    )

    assert sorted(dealt) == list(range(len(features)))
    assert found.load.tolist() == ends(features, workers, found, padded=padded)
    assert found.load.max() >= found.bound
    counts = np.bincount(found.owner, minlength=workers.world_size)
    assert counts.min() >= 1 or len(features) < workers.world_size


@given(problem(most_samples=7, most_workers=3))
def test_few_samples_are_split_nearly_as_well_as_can_be(case):
    """Beside all assignments: the worst case of moves and swaps is no more than 4/3."""
    features, workers = case

    assert partition(features, workers).load.max() * 3 <= by_enumeration(features, workers) * 4


def test_swaps_mend_what_the_longest_first_gets_wrong():
    """3, 3, 2, 2, 2 on two workers: in turns they end at 7 and 5, and at best both at 6."""
    assert partition(np.array([3, 3, 2, 2, 2]), 2).load.tolist() == [6, 6]
    capped = partition(np.array([3, 3, 2, 2, 2]), 2, forwards=Forwards(max_samples=2, equal=True))
    assert capped.load.tolist() == [6, 6]


def test_moves_and_swaps_keep_to_the_caps():
    """A worker of speed 1 and one of 1/3, with two forwards of 17 tokens: full ones are left out.

    A search that forgets the caps ends at 51, as its answer fits into no forwards.
    """
    size = np.array([9, 5, 6, 9, 7, 6, 5])
    workers = WorkerCosts(np.array([[1], [3]]), np.zeros(2, np.int64))
    found = partition(size, workers, forwards=Forwards(size=size, max_size=17, equal=True))

    assert found.load.max() <= 48


def test_a_bound_is_below_what_any_assignment_reaches():
    """By enumeration, on small cases of all kinds."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        features = rng.integers(1, 100, (6, 2))
        workers = WorkerCosts(rng.integers(1, 9, (3, 2)), rng.integers(0, 100, 3))
        assert partition(features, workers).bound <= by_enumeration(features, workers)


@pytest.mark.parametrize("seed", range(4))
def test_a_mixed_integer_program_is_hardly_better(seed):
    """16 samples on workers of speeds 1:1:2:4: within 3 % of the optimum."""
    rng = np.random.default_rng(seed)
    length = np.exp(rng.normal(5.5, 0.8, 16)).astype(np.int64)
    features = np.stack([length, length**2], 1)
    speed = np.array([1, 1, 2, 4])
    workers = WorkerCosts(np.stack([24576 * 4 // speed, 4 // speed], 1), np.zeros(4, np.int64))

    assert partition(features, workers).load.max() <= by_integer_program(features, workers) * 1.03


@given(problem(most_samples=9, most_workers=3))
def test_padded_samples_are_in_the_best_runs(case):
    """Of the sorted samples, over all orders of the workers: to 1 part in 2,000."""
    features, workers = case
    found = partition(features, workers, padded=True)

    assert found.load.max() <= by_runs(features, workers) * (1 + 1 / 2000) + 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("speeds", [(1, 1, 1, 1), (1, 1, 2, 4)])
@pytest.mark.parametrize("num_samples", [32, 256, 1024])
def test_many_samples_end_within_a_percent_of_the_bound(padded, speeds, num_samples):
    """Additive costs; padded ones of one length, where there is no padding."""
    rng = np.random.default_rng(num_samples)
    length = np.exp(rng.normal(5.5, 0.8, num_samples)).astype(np.int64)
    length = np.full(num_samples, 300) if padded else length
    speed = np.array(speeds)
    workers = WorkerCosts(np.stack([24576 * 4 // speed, 4 // speed], 1), np.zeros(4, np.int64))
    found = partition(np.stack([length, length**2], 1), workers, padded=padded)

    assert found.limit == "work"
    assert found.load.max() <= found.bound * (1.01 + 4 * padded / num_samples)


@pytest.mark.parametrize("world_size", [4, 64])
def test_fixed_costs_of_many_workers_are_in_the_bound(world_size):
    """With their weights, what 64 bits can hold of one is more than they can of all together."""
    workers = WorkerCosts(np.full((world_size, 1), 2**40), np.full(world_size, 2**48))

    found = partition(np.ones(8 * world_size, np.int64), workers)

    assert (found.limit, found.bound) == ("work", 2**48 + 2**43)
    assert found.load.max() == found.bound


def test_one_long_sample_rules_and_it_is_said():
    """No split helps: the bound is the sample itself, on the fastest worker."""
    workers = WorkerCosts(np.array([[4], [1]]), np.array([0, 10]))
    found = partition(np.array([1, 1, 1000, 1]), workers)

    assert (found.limit, found.bound) == ("sample", 1010)
    assert found.load.max() == 1010
    assert found.owner[2] == 1


@given(
    st.lists(st.integers(1, 50), min_size=4, max_size=40),
    st.integers(50, 120),
    st.integers(1, 8),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.booleans(),
)
def test_caps_of_a_forward_are_kept(length, max_size, max_samples, asked, padded):
    """Tokens and samples, and forwards that are as many on all ranks where that is asked for."""
    size, (equal, empty) = np.array(length), asked
    forwards = Forwards(
        max_samples=max_samples, size=size, max_size=max_size, equal=equal, empty=empty
    )
    workers = WorkerCosts(np.array([[1], [2], [5]]), np.zeros(3, np.int64))
    found = None
    with nullcontext() if empty or not equal else suppress(ValueError):  # there may be no way
        found = partition(size, workers, padded=padded, forwards=forwards)
    if found is None:
        return
    for rank in range(3):
        for forward in found.samples(rank):
            tokens = size[forward].max(initial=0) * len(forward) if padded else size[forward].sum()
            assert tokens <= max_size
            assert (not empty) <= len(forward) <= max_samples
    assert not equal or len(set(found.num_forwards.tolist())) == 1
    assert np.bincount(found.owner, minlength=3).sum() == len(size)


def largest_differencing(length, world_size):
    """Return the sums of parts of equally many samples, as verl's trainers form them."""
    blocks = np.sort(length).reshape(-1, world_size)[:, ::-1]
    parts = [block.astype(int) for block in blocks]  # each descending
    while len(parts) > 1:
        parts.sort(key=lambda part: part[-1] - part[0])
        widest, next_widest, *others = parts
        parts = [*others, np.sort(widest + next_widest[::-1])[::-1]]
    return parts[0]


@pytest.mark.parametrize(("num_samples", "world_size"), [(32, 4), (128, 8), (24, 3), (16, 8)])
def test_equally_many_samples_are_parted_better_than_by_largest_differencing(
    num_samples, world_size
):
    """A trainer that owns its data may ask for ranks with as many samples each."""
    most = []
    for seed in range(10):
        drawn = np.random.default_rng(seed).lognormal(6, 1, num_samples)
        length = np.clip(drawn, 10, 8192).astype(int)
        forwards = Forwards(max_samples=num_samples // world_size, equal=True)
        found = partition(length, world_size, forwards=forwards)
        assert set(np.bincount(found.owner)) == {num_samples // world_size}
        most.append((found.load.max(), largest_differencing(length, world_size)[0]))
    ours, theirs = np.mean(most, axis=0)

    assert ours <= theirs


@pytest.mark.parametrize("padded", [False, True])
def test_equal_forwards_are_as_few_as_caps_allow(padded):
    """12 samples of one length on 2 ranks: 3 to a forward are 2 forwards each."""
    size = np.full(12, 10)
    workers = WorkerCosts(np.array([[1], [3]]), np.zeros(2, np.int64))
    for forwards in (
        Forwards(max_samples=3, equal=True),
        Forwards(size=size, max_size=30, equal=True),
    ):
        found = partition(size, workers, padded=padded, forwards=forwards)
        assert found.num_forwards.tolist() == [2, 2]
    with pytest.raises(ValueError, match="empty=True"):
        partition(size[:5], workers, padded=padded, forwards=Forwards(max_samples=1, equal=True))
    found = partition(
        size[:5],
        workers,
        padded=padded,
        forwards=Forwards(max_samples=1, equal=True, empty=True),
    )
    assert found.num_forwards.tolist() == [3, 3]


def test_forwards_are_equal_where_only_padding_fills_them():
    """107 tokens fit into one forward, and 4 samples that are padded to 100 do not."""
    size = np.array([100, 1, 1, 1, 1, 1, 1, 1])
    features = np.stack([np.ones_like(size), size], axis=1)
    workers = WorkerCosts(np.array([[100, 1], [100, 1]]), np.zeros(2, np.int64))

    found = partition(
        features, workers, padded=True, forwards=Forwards(size=size, max_size=150, equal=True)
    )

    assert found.num_forwards.tolist() == [1, 1]
    assert sorted(len(found.samples(rank)[0]) for rank in range(2)) == [1, 7]


def test_workers_have_caps_of_their_own():
    """A long sample goes to the one worker that holds it, however slow that is."""
    size = np.array([90, 10, 10, 10])
    workers = WorkerCosts(np.array([[1], [9]]), np.zeros(2, np.int64))
    found = partition(size, workers, forwards=Forwards(size=size, max_size=np.array([30, 100])))

    assert found.owner[0] == 1
    assert sorted(np.concatenate(found.samples(0))) == [1, 2, 3]


def test_fewer_samples_than_workers():
    """Some have one forward with nothing in it; the others one sample each."""
    for padded in (False, True):
        found = partition(np.array([5, 7]), 4, padded=padded)
        assert sorted(len(found.samples(rank)[0]) for rank in range(4)) == [0, 0, 1, 1]
        assert found.num_forwards.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("padded", [False, True])
def test_all_processes_find_the_same(padded):
    """The checksum of a large case from a process of its own is the one found here."""
    code = (
        "import numpy as np; from evenstep.solve import *;"
        "f = np.random.default_rng(0).integers(1, 4000, 500);"
        "w = WorkerCosts(np.arange(1, 17)[:, None], np.arange(16));"
        f"print(partition(f, w, padded={padded}).checksum)"
    )
    theirs = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    features = np.random.default_rng(0).integers(1, 4000, 500)
    workers = WorkerCosts(np.arange(1, 17)[:, None], np.arange(16))

    assert int(theirs.stdout) == partition(features, workers, padded=padded).checksum


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1.5, 2.0], 2), ValueError, "integers of at least 0"),
        (([-1, 2], 2), ValueError, "integers of at least 0"),
        (([], 2), ValueError, "have a sample"),
        (([[1, 2]], WorkerCosts([[1]], [0])), ValueError, "have 1 columns"),
        (([1, 2], 0), ValueError, "at least 1, got 0"),
        (([1 << 49, 1 << 49, 1 << 49], 2), OverflowError, "coarser unit"),
    ],
)
def test_what_cannot_be_partitioned_is_refused(arguments, error, text):
    """With the rule and what to do."""
    features, workers = arguments
    if isinstance(features, list) and not features:
        features = np.zeros(0, np.int64)
    with pytest.raises(error, match=text):
        partition(features, workers)


def test_workers_and_forwards_that_make_no_sense_are_refused():
    """Where they are made."""
    with pytest.raises(ValueError, match="have the shapes"):
        WorkerCosts([1, 2], [0, 0])
    with pytest.raises(ValueError, match="integers of at least 0"):
        WorkerCosts([[1.5]], [0])
    with pytest.raises(ValueError, match="at least 1"):
        Forwards(max_samples=0)
    with pytest.raises(ValueError, match="be given together"):
        Forwards(size=[1, 2])
    with pytest.raises(ValueError, match="grow together"):
        partition(np.array([[1, 2], [2, 1]]), 2, padded=True)
    with pytest.raises(ValueError, match="where sample 1 has 9"):
        partition([1, 9], 2, forwards=Forwards(size=[1, 9], max_size=5))


@pytest.mark.parametrize("padded", [False, True])
def test_equal_workers_take_turns_at_the_longest_samples(padded):
    """The two slow ones among themselves, the two fast ones too; it is free, and one for all."""
    rng, owners = np.random.default_rng(0), []
    workers = WorkerCosts(np.array([[4], [1], [4], [1]]), np.zeros(4, np.int64))
    for _ in range(200):
        lengths = rng.integers(1, 1000, 24)
        found = partition(lengths, workers, padded=padded)
        owners.append(found.owner[lengths.argmax()])
        assert found.checksum == partition(lengths, workers, padded=padded).checksum
    count = np.bincount(owners, minlength=4)

    assert abs(count[0] - count[2]) < 0.3 * max(count[0] + count[2], 40)
    assert abs(count[1] - count[3]) < 0.3 * max(count[1] + count[3], 40)


@pytest.mark.parametrize("forwards", [{}, {"equal": True, "empty": True}], ids=str)
def test_a_worker_whose_forwards_hold_nothing_gets_nothing(forwards):
    """All samples go to the other one."""
    lengths = np.array([50, 60, 3, 20])

    found = partition(lengths, 2, forwards=Forwards(size=lengths, max_size=[0, 100], **forwards))

    assert found.owner.tolist() == [1, 1, 1, 1]
    assert found.num_forwards[1] == 2
