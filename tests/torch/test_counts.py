"""Micro-batches of one size: every forward has it, only their number differs between ranks."""

import pytest

from evenstep._planner import Bounds, Job, Planner, Report
from evenstep.events import MemoryCapped, SizesHeld
from evenstep.policies import Fixed
from evenstep.testing import run_workers

from .counts import GRANULE, MISTAKES, epochs, mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vary": "both"}, r"`Bounds\(vary=...\)` must be \"size\" or \"count\", got 'both'"),
        (
            {"vary": "count", "granularity": (4, 4)},
            r"`Bounds\(granularity=...\)` must be one number with `vary='count'`, got \(4, 4\)",
        ),
        (
            {"vary": "count", "granularity": 8, "max": (16, 4)},
            r"`Bounds\(max=...\)` must be at least the granularity, 8, .* Every forward has",
        ),
    ],
)
def test_bounds_that_contradict_a_fixed_size_are_refused(options, message):
    """With the rule and the remedy."""
    with pytest.raises(ValueError, match=message):
        Bounds(**options)


def planner(bounds, **options):
    job = Job(2, 32, bounds=bounds, cuts=True, **options)
    return Planner(Fixed((24, 8)), job)


def reports(step, sizes, peaks, capacity):
    return [
        Report(step, size, 32, 0.01 * size, 0.0, 0.01, peak, capacity)
        for size, peak in zip(sizes, peaks, strict=True)
    ]


def test_a_plan_says_the_one_size():
    """Whatever cap was given: it bounds a forward, and that has its size."""
    plan = planner(Bounds(vary="count", granularity=4, max=9)).plan

    assert plan.max_forward == (4, 4)
    assert plan.forwards(0, plan.batch_size[0]) == (4,) * 6


def test_a_modelled_cap_above_the_size_changes_nothing():
    """A worker may get any number of micro-batches, each of which fits."""
    held = planner(Bounds(vary="count", granularity=4))
    events = held.observe(reports(0, (24, 8), (4000, 4000), 10_000), next_step=1)

    assert all(event.max_batch_size >= 4 for event in events if isinstance(event, MemoryCapped))
    assert not any(isinstance(event, SizesHeld) for event in events)
    assert held.plan.max_forward == (4, 4)


def test_a_size_that_does_not_fit_is_reported():
    """Smaller forwards would break what was asked for, so training goes on and says what to do."""
    held = planner(Bounds(vary="count", granularity=4))
    events = held.observe(reports(0, (24, 8), (12_000, 4000), 10_000), next_step=1)

    (short,) = [event for event in events if isinstance(event, SizesHeld)]
    assert "fit into every worker's memory with `vary='count'`" in short.problem
    assert held.plan.max_forward == (4, 4)


def test_a_peak_belongs_to_the_forward_that_had_it():
    """A cap of 9 cuts 24 into three of 8: what they took says nothing of 9 yet."""
    held = planner(Bounds(max=9))
    held.observe(reports(0, (24, 8), (8000, 8000), 10_000), next_step=1)
    sizes, _, _ = held._caps.peaks

    assert sizes[0].max() == 8


@pytest.fixture(scope="module")
def found():
    """What came of every epoch, by rank."""
    return run_workers(3, epochs)


RUNS = ("restless", "restless fsdp2", "with workers", "tiny tail", "tiny tail fsdp2")


@pytest.mark.cluster
@pytest.mark.parametrize("name", RUNS)
def test_every_forward_has_the_one_size(found, name):
    """In full steps. In the short last one, one rank's last forward may be smaller."""
    full = [rows for rank in found for step in rank[name]["rows"][:-1] for rows in step]
    tails = [rank[name]["rows"][-1] for rank in found]
    odd = [rows for tail in tails for rows in tail if rows != GRANULE]
    stand_ins = sum(tail == [1] for tail in tails)

    assert set(full) == {GRANULE}
    assert len(odd) - stand_ins <= 1
    assert min(map(len, tails)) >= 1


@pytest.mark.cluster
@pytest.mark.parametrize("name", RUNS)
def test_counts_differ_and_the_gradient_is_exact(found, name):
    """1e-12 in every step, each sample once over all ranks, ranks without one included."""
    counts = {tuple(len(rank[name]["rows"][0]) for rank in found)}
    seen = sorted(number for rank in found for number in rank[name]["seen"])

    assert len(set(*counts)) > 1 or len(found[0][name]["plans"]) > 1
    assert max(rank[name]["error"] for rank in found) <= 1e-12
    assert seen == list(range(len(seen)))
    assert len(seen) in (48 * 4 + 13, 48 + 2)


@pytest.fixture(scope="module")
def refused():
    """Error texts by mistake."""
    return run_workers(2, mistakes)[0]


@pytest.mark.cluster
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused(refused, mistake):
    """On every rank, with the remedy."""
    assert MISTAKES[mistake][1] in refused[mistake]
