"""How a loop meets the loader: steps, micro-batches, stand-ins, and what is refused."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from .loader_fakes import FixedPlan, Items, RandomPlans, Ranks, Recorder, alone


def test_every_batch_is_announced_before_it_is_handed_out():
    """Step numbers run on over epochs, sizes are those handed out, and the loop's end is told."""
    listener = Recorder()
    loader = alone(DataLoader(Items(10), batch_size=4), listener=listener)
    for _ in range(2):
        for _ in loader:
            pass

    calls = listener.calls
    assert [call for call in calls if call[0] == "step"] == [
        ("step", 0, 4, 4),
        ("step", 1, 4, 4),
        ("step", 2, 2, 2),
        ("step", 3, 4, 4),
        ("step", 4, 4, 4),
        ("step", 5, 2, 2),
    ]
    assert calls[:2] == [("step", 0, 4, 4), ("forward", 4, True)]
    assert [k for k, call in enumerate(calls) if call == ("end",)] == [6, 13]


def test_a_loop_that_is_left_early_is_over():
    """The listener hears of it at once, and the next loop is the next epoch."""
    listener = Recorder()
    loader = alone(DataLoader(Items(10), batch_size=4), listener=listener)
    for _ in loader:
        break

    assert listener.calls[-1] == ("end",)
    assert len(list(loader)) == 3


def test_a_rank_without_samples_gets_a_stand_in_of_weight_0():
    """One sample, the step's first, so that its backward can meet the others'."""
    ranks = Ranks(lambda rank: DataLoader(Items(9)), FixedPlan(4, 0, tail=(0, 1)), world_size=2,
                  size=4)  # fmt: skip
    batches = [[batch[0].tolist() for batch in step] for step in ranks.epoch()]

    assert batches == [[[0, 1, 2, 3], [0]], [[4, 5, 6, 7], [4]], [[8], [8]]]
    assert ranks.listeners[1].calls[:2] == [("step", 0, 0, 4), ("forward", 0, True)]
    assert ranks.listeners[0].calls[-3:] == [("step", 2, 0, 1), ("forward", 0, True), ("end",)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_cut_large_batches_into_micro_batches(num_workers):
    """As few as the plan allows, equal within one; gradients synchronise in the last alone."""
    log = []

    @contextmanager
    def no_sync():
        log.append("apart")
        yield
        log.append("together")

    listener = Recorder()
    loader = alone(
        DataLoader(Items(17), batch_size=10, num_workers=num_workers),
        FixedPlan(10, tail=(7,), max_forward=(4,)),
        listener=listener,
        no_sync=no_sync,
    )
    steps = []
    for step in loader.steps():
        assert step.num_samples == step.global_num_samples
        steps.append([micro[0].tolist() for micro in step])
        assert len(steps[-1]) == step.num_micro_batches

    assert steps == [
        [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]],
        [[10, 11, 12, 13], [14, 15, 16]],
    ]
    forwards = [call for call in listener.calls if call[0] == "forward"]
    assert forwards == [
        ("forward", 4, False),
        ("forward", 3, False),
        ("forward", 3, True),
        ("forward", 4, False),
        ("forward", 3, True),
    ]
    assert log == ["apart", "together"] * 3


def test_a_plain_loop_takes_its_batch_in_one_piece():
    """Only loops over `steps` can take several forwards."""
    plan = FixedPlan(10, max_forward=(4,))

    assert [len(batch[0]) for batch in alone(DataLoader(Items(20), batch_size=10), plan)] == [
        10,
        10,
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loop_goes_on_after_another_one(num_workers, shuffle):
    """A look at a batch by `next(iter(loader))`, say: each loop goes through its own order."""
    loader = alone(DataLoader(Items(8), batch_size=2, shuffle=shuffle, num_workers=num_workers))
    older, found = iter(loader), []
    for _ in range(2):
        found += next(older)[0].tolist()
        newer = iter(loader)
        first = [next(newer)[0].tolist() for _ in range(3)]
        found += next(older)[0].tolist()
        looked = next(iter(loader))[0].tolist()
        assert shuffle or (first, looked) == ([[0, 1], [2, 3], [4, 5]], [0, 1])
    loader.close()

    assert sorted(found) == list(range(8))
    assert shuffle or found == list(range(8))


def test_the_state_is_that_of_the_loop_that_goes_on():
    """A checkpoint after a look at a batch resumes the loop, and not the look."""
    loader = alone(DataLoader(Items(8), batch_size=2))
    loop = iter(loader)
    next(loop)
    before = loader.state_dict()
    next(iter(loader))

    after = loader.state_dict()

    differing = {name for name in before if after[name] != before[name]}
    assert differing == {"steps_of_run", "checksum"}  # the look was a step of the run


def test_a_closed_loader_ends_the_loop_under_way():
    """It cannot go on, and says so; the next one can begin."""
    loader = alone(DataLoader(Items(8), batch_size=2))
    older = iter(loader)
    next(older)
    loader.close()

    with pytest.raises(RuntimeError, match="was closed"):
        next(older)
    assert len(list(loader)) == 4


class Probing:
    probes = True


def test_a_loop_that_is_refused_is_over_at_once():
    """Also while somebody looks at the error, which keeps its frames alive."""
    listener = Recorder()
    loader = alone(DataLoader(Items(8), batch_size=2), listener=listener)
    loader.attempts = Probing()

    with pytest.raises(ValueError, match=r"step\.backward\(closure\)") as caught:
        next(iter(loader))
    assert listener.calls[-1] == ("end",)
    assert caught.tb is not None


def test_a_source_of_plans_keeps_no_loader_alive():
    """The balancer outlives its loaders."""
    plans = RandomPlans(1, 2)
    loader = alone(DataLoader(Items(8), batch_size=2), plans)
    next(iter(loader))
    alive = weakref.ref(loader)
    del loader
    gc.collect()

    assert alive() is None
    plans.announce(5)


def test_plans_that_do_not_add_up_are_refused():
    """Samples would be lost without a word."""
    with pytest.raises(ValueError, match="add up to the global batch of 4"):
        list(alone(DataLoader(Items(6), batch_size=4), FixedPlan(3)))


class Sharding(DistributedSampler):
    def __iter__(self):
        return iter([0])


class Replaced(DataLoader):
    def __iter__(self):
        return iter([])


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (
            lambda: DataLoader(Items(8), batch_sampler=BatchSampler(range(8), 2, False)),
            "yield global batches of 4 samples each, got batches of 2",
        ),
        (lambda: DataLoader(Items(8), batch_size=None), "got batch_size=None"),
        (lambda: DataLoader(Items(0)), "at least 1 samples an epoch, got 0"),
        (lambda: DataLoader(Items(3), batch_size=4, drop_last=True), "at least 4 samples"),
        (
            lambda: DataLoader(Items(8), sampler=DistributedSampler(range(8), 2, 0)),
            "be the 1 ranks",
        ),
        (lambda: DataLoader(Items(8), sampler=Sharding(range(8), 1, 0)), "of its own kind"),
        (lambda: Replaced(Items(8)), "iterates as torch's does"),
    ],
)
def test_loaders_that_cannot_be_balanced_are_refused(make, rule):
    """With the rule and the remedy."""
    with pytest.raises(ValueError, match=rule):
        alone(make(), FixedPlan(4), size=4)


@pytest.mark.parametrize(
    ("sampler", "rule"),
    [(["a", "b"], "yield integers, got 'a'"), ([0.5, 1.0], "yield integers, got 0.5")],
)
def test_indices_that_are_no_integers_are_refused(sampler, rule):
    """The order is shared as integers; keys belong into the data set."""
    with pytest.raises(ValueError, match=rule):
        next(iter(alone(DataLoader(Items(2), batch_size=2, sampler=sampler))))


class Miscounted(list):
    def __len__(self):
        return 5


def test_a_sampler_that_miscounts_is_refused_on_every_rank():
    """Rank 0 says why; the others do not wait for an order that never comes."""
    ranks = Ranks(
        lambda rank: DataLoader(Items(8), sampler=Miscounted([1, 2])),
        FixedPlan(1, 1, tail=(1, 0)),
        world_size=2,
        size=2,
    )

    with pytest.raises(ValueError, match="as many indices as its length says, 5, got 2"):
        next(iter(ranks.loaders[0]))
    with pytest.raises(RuntimeError, match="failed on rank 0"):
        next(iter(ranks.loaders[1]))
