"""What fits bounds plans by cost: tokens of a forward, by the peaks of those that were visited."""

import numpy as np
import pytest

from evenstep._planner import Cost, CostPlanner, Job, Planner, Report, Work, assign
from evenstep.events import MemoryCapped, SizesHeld
from evenstep.policies import Auto
from evenstep.solve import WorkerCosts

from .playing import Playing

WORLD_SIZE, BATCH_SIZE = 3, 24
SPEED = np.array([4.0, 1.0, 1.0])
FIXED, EACH = 2_000_000, 1000  # bytes of a model, and of a token
LENGTH = np.clip(np.random.default_rng(0).lognormal(5, 1, 4096), 8, 1500).astype(int)


class Run(Playing):
    """Steps of ranks whose memory and speeds are known.

    Args:
        room: tokens of a forward that each rank's memory holds, a tenth to spare included.
        padded: whether a forward takes as much as its longest sample, times its samples.
        noise: of a peak, relative, at most.
        whole: whether a rank has a single forward.
        true: seconds of a sample, of a token, and of a token squared.
        length: of the samples.
        speed: of the ranks.
        seen: whether lengths become known later, to ``costs``.
    """

    def __init__(
        self,
        room,
        *,
        padded=False,
        noise=0.0,
        whole=False,
        true=(0, 1e-4, 0),
        length=LENGTH,
        speed=SPEED,
        seen=False,
    ):
        self.true_costs = self.costs = Cost(length, padded=padded).table(range(len(length)))
        if seen:
            self.costs = Cost(from_batch="length", padded=padded).table(range(len(length)))
        self.capacity = FIXED + np.broadcast_to(room, WORLD_SIZE) * EACH
        self.noise, self.whole = noise, whole
        self.true, self.speed = np.array(true), np.array(speed)
        self.rng = np.random.default_rng(1)
        job = Job(WORLD_SIZE, BATCH_SIZE, cuts=not whole)
        super().__init__(CostPlanner(job, self.costs, kinds=[0] * WORLD_SIZE))
        self.num_forwards = np.zeros(WORLD_SIZE, int)
        self.largest, self.peaks, self.caps = [], [], []

    def step(self, step, **changed):
        plan = self.plan_of(step)
        indices = self.rng.integers(0, len(LENGTH), BATCH_SIZE)
        features = self.true_costs.features(indices)
        if plan.costs is None:
            forwards = [[part] for part in np.split(features, np.cumsum(plan.batch_size)[:-1])]
        else:
            found = assign(
                self.costs,
                self.costs.features(indices),
                plan.costs.workers(),
                caps=plan.max_forward if plan.costs.knows == self.costs.is_known else None,
                whole=self.whole,
            )
            ranks = range(WORLD_SIZE)
            forwards = [[features[one] for one in found.samples(rank)] for rank in ranks]
        largest = [max(self.costs.total([one])[1] for one in own) for own in forwards]
        spread = 1 + self.noise * self.rng.uniform(-1, 1, WORLD_SIZE)
        peaks = np.rint((FIXED + EACH * np.array(largest)) * spread).astype(int)
        work = [self.costs.total(own) for own in forwards]
        took = np.array(work) @ self.true / self.speed * self.rng.normal(1, 0.02, WORLD_SIZE)
        self.num_forwards += [len(own) for own in forwards]
        self.largest.append(largest)
        self.peaks.append(peaks)
        self.caps.append(plan.max_forward)
        reports = [
            Report(
                step,
                sum(map(len, own)),
                BATCH_SIZE,
                float(took[rank]),
                0.0,
                largest_forward=largest[rank],
                peak_bytes=int(peaks[rank]),
                capacity_bytes=int(self.capacity[rank]),
                work=Work(work[rank], work[rank], work[rank]),
                **changed,
            )
            for rank, own in enumerate(forwards)
        ]
        self.show(reports)


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("room", [4500, [4000, 6000, 9000]])
def test_no_forward_exceeds_what_fits(room, padded, noise):
    """A rank four times as fast, whose share would be too large: in several forwards.

    A forward within its cap, or of a single sample; no peak beyond what the device offers.
    """
    run = Run(room, padded=padded, noise=noise).run(60)

    for step, caps in enumerate(run.caps):
        if caps is not None:
            assert np.all(np.array(run.largest[step]) <= np.maximum(caps, LENGTH.max()))
    assert np.all(run.peaks <= run.capacity)
    assert run.num_forwards[0] > 66  # or no share was too large


@pytest.mark.parametrize("whole", [False, True])
def test_before_lengths_are_known_samples_are_capped(whole):
    """As many as fit by their mean length, which a rank's speed does not change; then by tokens."""
    run = Run(4500, whole=whole, seen=True, speed=[40, 1, 1]).run(40)
    by_count = run.plans[-1].max_forward
    run.costs.correct(np.arange(len(LENGTH)), LENGTH)
    run.run(40, first=40)

    assert 4 <= max(by_count) <= 0.9 * 4500 / LENGTH.mean()
    assert np.mean(np.max(run.largest[1:40], axis=1) <= 4500) >= 0.9
    assert min(run.plans[-1].max_forward) > LENGTH.max()
    assert np.all(run.peaks[44:] <= run.capacity)


def test_forwards_grow_by_bounded_steps():
    """To twice the largest so far at most, or to a single sample, whatever memory there is."""
    run = Run(10**6, whole=True, speed=[40, 1, 1]).run(60)
    largest = np.array(run.largest)
    visited = np.maximum.accumulate(largest)

    assert np.all(largest[2:] <= np.maximum(2 * visited[1:-1], LENGTH.max()))
    assert largest[10:, 0].mean() > 2 * largest[:2, 0].mean()  # or nothing grew


def test_no_rank_is_kept_from_the_longest_samples():
    """A few that are far longer than all others: where memory suffices, each rank gets some."""
    length = np.where(np.arange(len(LENGTH)) % 12, 100, 8000)
    run = Run(10**5, length=length, speed=[1, 1, 1]).run(40)

    assert min(run.plans[-1].max_forward) >= 8000
    assert np.count_nonzero(np.array(run.largest) >= 8000, axis=0).min() >= 10


def test_a_plan_keeps_to_caps_by_moving_samples_where_a_rank_has_one_forward():
    """A fast rank of little memory: what it cannot take goes to others that have the room."""
    run = Run([2600, 9000, 9000], whole=True).run(60)
    caps = np.array(run.caps[10:])
    longest_step = max(map(sum, run.largest))

    assert longest_step < caps.sum(axis=1).min()
    assert np.all(np.array(run.largest[10:]) <= caps)
    assert np.all(run.peaks <= run.capacity)


def test_caps_move_seldom():
    """Every step has a forward of another size, and makes no new plan."""
    run = Run(4500, padded=True, noise=0.01).run(50)
    number = len(run.plans)

    assert number <= 10
    assert len(run.run(100, first=50).plans) - number <= 5
    assert sum(isinstance(event, MemoryCapped) for event in run.events) <= 6


def test_what_fits_is_told_in_tokens():
    """By name of the unit; each change once."""
    run = Run(4000).run(40)
    told = [event for event in run.events if isinstance(event, MemoryCapped)]

    assert {event.unit for event in told} == {"size"}
    assert {event.rank for event in told} == {0, 1, 2}
    for rank in range(WORLD_SIZE):
        newest = [event.max_batch_size for event in told if event.rank == rank][-1]
        assert newest == run.plans[-1].max_forward[rank]


def test_what_a_rank_found_not_to_fit_is_a_cap():
    """From the next step on, for good, where no memory is read."""
    run = Run(-FIXED // EACH).run(5)
    run.step(5, again=True, limit=1500)
    run.step(6, limit=2500)

    assert run.plans[-1].max_forward == (1500,) * WORLD_SIZE
    assert [e.max_batch_size for e in run.events if isinstance(e, MemoryCapped)] == [1500] * 3


def test_a_given_cap_holds_beside_the_modelled():
    """The smaller one of the two."""
    costs = Cost(LENGTH, padded=False, max_size=2000).table(range(len(LENGTH)))
    planner = CostPlanner(Job(1, 8), costs, kinds=[0])
    work = Work((8, 1600, 320000), (8, 1600, 320000), (8, 1600, 320000))
    report = Report(0, 8, 8, 0.1, 0.0, largest_forward=1600, work=work)

    planner.observe([report], next_step=1)
    assert planner.plan.max_forward is None
    planner.observe([report._replace(peak_bytes=160, capacity_bytes=190)], next_step=1)
    assert planner.plan.max_forward == (1710,)


def test_where_counts_predict_as_well_they_keep_to_caps_too():
    """Time goes by the number of samples, and memory by tokens: by count, within what fits."""
    run = Run(2600, true=(1e-2, 0, 0)).run(80)

    assert "lengths tell no more" in run.plans[-1].reason
    assert np.all(run.peaks <= run.capacity)
    assert max(map(max, run.largest)) > 1500


def test_counts_are_kept_where_any_samples_would_fit():
    """Sizes that have to stay: by count, if so many of the longest fit, and else by cost."""
    for room, by_count in {10**6: True, 3000: False}.items():
        run = Run(room, length=np.full(len(LENGTH), 100)).run(20)
        run.step(20, holds=True)

        assert (run.plans[-1].costs is None) == by_count
        assert len([event for event in run.events if isinstance(event, SizesHeld)]) == 1


def test_peaks_are_those_of_the_same_lengths():
    """A run goes on from them, on other ranks; not with other lengths, nor where it counts."""
    known = Run(4000).run(30).planner
    again, other = Run(4000).planner, Run(4000, length=LENGTH + 1).planner
    counting = Planner(Auto(), Job(WORLD_SIZE, BATCH_SIZE))
    for planner in (again, other, counting):
        planner.restore(known.learnt(), np.array([2, 0, 1]))

    assert again.plan.max_forward is not None
    assert other.plan.max_forward is None
    assert counting.learnt()["memory"][0].max() == 0


def test_a_step_without_a_way_is_computed_all_the_same():
    """One forward, and more than all ranks hold: by an eighth at most above what it needs."""
    costs = Cost(np.full(12, 100), padded=False).table(range(12))
    features = costs.features(np.arange(12))
    workers = WorkerCosts.equal(3, features)
    found = assign(costs, features, workers, caps=[250] * 3, whole=True)

    assert found.num_forwards.tolist() == [1, 1, 1]
    assert np.bincount(found.owner).tolist() == [4, 4, 4]


def test_a_sample_larger_than_all_caps_goes_where_most_fits():
    """It cannot be cut."""
    costs = Cost([900, *[50] * 6], padded=False).table(range(7))
    features = costs.features(np.arange(7))
    workers = CostPlanner(Job(2, 7), costs, kinds=[0, 0]).plan.costs.workers()
    found = assign(costs, features, workers, caps=[150, 200])

    assert found.owner.tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert [len(own) for own in found.samples(0)] == [3, 3]


def test_several_such_samples_are_shared_by_alike_ranks():
    """Those with nearly the most room: never by one that has much less."""
    costs = Cost([900] * 4 + [50] * 6, padded=False).table(range(10))
    features = costs.features(np.arange(10))
    workers = CostPlanner(Job(3, 10), costs, kinds=[0] * 3).plan.costs.workers()
    found = assign(costs, features, workers, caps=[190, 100, 200])

    assert sorted(found.owner[:4].tolist()) == [0, 0, 2, 2]


def test_equal_forwards_keep_to_caps():
    """As where forwards are collective: as many on each rank, none past its cap."""
    costs = Cost(LENGTH[:24], padded=False).table(range(24))
    features = costs.features(np.arange(24))
    workers = CostPlanner(Job(2, 24), costs, kinds=[0, 0]).plan.costs.workers()
    caps = [int(LENGTH[:24].max()), 2000]
    found = assign(costs, features, workers, caps=caps, equal_forwards=True)
    sizes = [[costs.total([features[one]])[1] for one in found.samples(rank)] for rank in (0, 1)]

    assert len(set(found.num_forwards.tolist())) == 1
    assert [max(own) <= cap for own, cap in zip(sizes, caps, strict=True)] == [True, True]


@pytest.mark.parametrize("padded", [False, True])
def test_equal_forwards_leave_room_for_unlike_numbers_of_samples(padded):
    """Two on each rank, none larger than an equal split's; ranks are nearly level all the same."""
    costs = Cost(LENGTH[:24], padded=padded).table(range(24))
    features = costs.features(np.arange(24))
    workers = CostPlanner(Job(3, 24), costs, kinds=[0] * 3).plan.costs.workers()
    found = assign(costs, features, workers, equal_forwards=True)
    largest = max(len(one) for rank in range(3) for one in found.samples(rank))

    assert found.num_forwards.tolist() == [2, 2, 2]
    assert largest <= 7
    assert found.load.max() <= (1.45 if padded else 1.01) * found.bound
