"""Indices that are drawn: one sequence for all ranks, which goes on anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.testing import run_workers
from evenstep.torch import DrawnIndices
from evenstep.torch._data.loaders._base import sealed

from .._tiers import slow_but
from .drawn_runs import (
    HIGH,
    STOPS_AFTER,
    in_one_process,
    in_parts,
    leaving_out,
    plain,
    with_dropout,
)
from .loader_fakes import FixedPlan, Ranks, alone, flat
from .order_fakes import seeded

DRAWS = 240


def sequence(high=97, seed=3, num=DRAWS):
    """The first draws, as one process reads them from the loader itself."""
    batches = iter(DrawnIndices(high, 8, generator=seeded(seed)))
    return torch.cat([next(batches) for _ in range(num // 8)]).tolist()


def one(high, generator=None):
    """The loader of a single rank."""
    return alone(DrawnIndices(high, 8, generator=generator), FixedPlan(8))


def ranks(plan, *, high=97, block_size=None):
    """The loaders of as many ranks as the plan has, with 8 draws a step."""
    return Ranks(
        lambda rank: DrawnIndices(high, 4, generator=seeded(3)),
        plan,
        world_size=len(plan.plan.batch_size),
        size=8,
        block_size=block_size,
    )


def steps_of(ranks, num):
    """The draws of so many steps, over all ranks."""
    iterators = [iter(loader) for loader in ranks.loaders]
    found = []
    for _ in range(num):
        batches = [next(iterator) for iterator in iterators]
        sizes = [listener.sizes()[-1] for listener in ranks.listeners]
        found.append([n for b, size in zip(batches, sizes, strict=True) for n in b[:size].tolist()])
    return found


@pytest.mark.parametrize("sizes", [(8,), (3, 5), (0, 8), (1, 5, 2)])
@pytest.mark.parametrize("block_size", [None, 1, 5, 8, 1000])
def test_a_step_has_the_next_draws_however_they_are_split(sizes, block_size):
    with ranks(FixedPlan(*sizes), block_size=block_size) as cluster:
        assert flat(steps_of(cluster, DRAWS // 8)) == sequence()


@given(
    at=st.integers(0, 1 << 40), num=st.integers(1, 9000), high=st.sampled_from([1, 2, 97, 1 << 48])
)
def test_any_part_of_a_sequence_is_the_same(at, num, high):
    """Read alone, or from before on; and all of it is in range."""
    order = DrawnIndices(high, 1, generator=seeded()).sampler.draw()
    first = max(0, at - 3)
    part = order.at(at, num)

    assert np.array_equal(part, order.at(first, num + 3)[at - first :][:num])
    assert part.min() >= 0
    assert part.max() < high


def test_draws_are_spread_evenly():
    """Each of 16 numbers comes 4,096 times in 65,536 draws, give or take 5 standard deviations."""
    order = DrawnIndices(16, 1, generator=seeded()).sampler.draw()
    counts = np.bincount(order.at(0, 1 << 16))

    assert np.abs(counts - 4096).max() < 5 * 62
    assert np.bincount(order.at(1 << 50, 1 << 16)).max() < 4096 + 5 * 62


def test_without_a_limit_each_number_comes_once():
    with ranks(FixedPlan(3, 5), high=None) as cluster:
        assert flat(steps_of(cluster, 10)) == list(range(80))


def test_the_data_set_of_indices_is_as_long_as_they_are():
    """Without a limit, longer than any training."""
    assert len(DrawnIndices(97, 8).dataset) == 97
    assert len(DrawnIndices(None, 8).dataset) >= 2**48


def test_each_loop_draws_another_sequence():
    loader = one(97, seeded())
    first, second = (next(iter(loader)).tolist() for _ in range(2))

    assert first != second


def test_torchs_own_generator_is_the_default():
    """As with a random sampler: the same after `torch.manual_seed`."""
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(next(iter(one(97))).tolist())

    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("block_size", [None, 1, 5, 64])
@pytest.mark.parametrize("done", [1, 7, 16])
def test_a_run_goes_on_on_other_ranks_and_with_other_blocks(done, block_size):
    with ranks(FixedPlan(3, 5), block_size=8) as before:
        first = steps_of(before, done)
        states = [loader.state_dict() for loader in before.loaders]
    assert states[0] == states[1]
    with ranks(FixedPlan(1, 5, 2), block_size=block_size) as after:
        for loader in after.loaders:
            loader.load_state_dict(states[0])
        rest = steps_of(after, DRAWS // 8 - done)
        assert flat(first + rest) == sequence()
        assert [loader.state_dict()["order"] for loader in after.loaders] == [
            states[0]["order"]
        ] * 3


def test_a_run_goes_on_late_without_the_draws_before():
    """At step 10**15, which nothing could be drawn up to."""
    loader = one(97, seeded(3))
    next(iter(loader))
    fields = {k: v for k, v in loader.state_dict().items() if k != "checksum"}
    late = sealed(fields | {"steps_taken": 10**15, "steps_of_run": 10**15})
    resumed = one(97, seeded(3))
    resumed.load_state_dict(late)
    order = DrawnIndices(97, 8, generator=seeded(3)).sampler.draw()

    assert next(iter(resumed)).tolist() == order.at(8 * 10**15, 8).tolist()


def test_another_sequence_is_refused():
    """One of another length: the seed comes with the state."""
    loader = one(97, seeded(3))
    next(iter(loader))
    other = one(98, seeded(3))
    other.load_state_dict(loader.state_dict())

    with pytest.raises(RuntimeError, match="did not draw the order of the checkpoint again"):
        next(iter(other))


def test_it_is_endless():
    with pytest.raises(TypeError, match="no length"):
        len(one(97))


@pytest.mark.parametrize("high", [0, -1, 2.5, True, "many", 1 << 49])
def test_a_wrong_limit_is_refused(high):
    with pytest.raises(ValueError, match=r"DrawnIndices\(high=\.\.\.\).*from 1 to 2\*\*48"):
        DrawnIndices(high, 8)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, None])
def test_a_wrong_batch_size_is_refused(batch_size):
    with pytest.raises(ValueError, match=r"DrawnIndices\(batch_size=\.\.\.\).*at least 1"):
        DrawnIndices(97, batch_size)


@pytest.mark.cluster
@pytest.mark.parametrize("ahead", slow_but([True], [False, True]))
def test_a_loop_in_nanogpts_order_is_exact(ahead, tmp_path):
    """Batches made of drawn indices, two of them a step, resumed on another number of ranks.

    Under sizes that change at every step, in double precision; ``ahead`` fetches the next batch
    between forward and backward.
    """
    expected = in_one_process(STOPS_AFTER + 6, ahead=ahead)
    for world_size, num in ((2, STOPS_AFTER), (3, 6)):
        found = run_workers(world_size, in_parts, str(tmp_path), num, ahead)
        sizes = [step for rank in found for step in rank["sizes"]]

    assert max(float((rank["parameters"] - expected).norm()) for rank in found) <= 1e-12
    assert len(set(sizes)) > 2


@pytest.mark.cluster
@pytest.mark.slow
def test_a_loop_that_leaves_out_batches_has_to_name_those_it_uses():
    """It is exact then. Otherwise it ends with the remedy, unless all were recognized by chance."""
    alone = run_workers(1, leaving_out, False)[0]
    named, unnamed = (run_workers(2, leaving_out, named) for named in (True, False))
    errors = [found for found in unnamed if isinstance(found, str)]

    assert max(float((found - alone).norm()) for found in named) <= 1e-12
    assert all("balancer.step(" in error for error in errors)
    assert errors or max(float((found - alone).norm()) for found in unnamed) <= 1e-12


@pytest.mark.cluster
def test_dropout_by_sample_follows_the_draws():
    """On one rank and on two, whose parts change at every step."""
    alone, halved = (run_workers(world_size, with_dropout, 4)[0] for world_size in (1, 2))

    assert float((halved - alone).norm()) <= 1e-12
    assert len(set(alone.tolist())) > 20


@pytest.mark.cluster
def test_with_evenstep_off_each_rank_draws_as_plain_training_does():
    for found in run_workers(2, plain):
        assert found["sizes"] == [4] * 5
        assert found["most"] < HIGH
        assert found["left"] == 4
