"""FSDP2: the clock, unlike counts without a hang, what is refused. Gradients: ``test_matrix``."""

import signal

import pytest
import torch
from torch.nn import functional

from evenstep.policies import Fixed
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Bounds

from .matrix import QUIET, flat, network, samples
from .sharded import (
    MISTAKES,
    PER_SAMPLE_S,
    alive,
    clock,
    grown,
    hybrid,
    interrupted,
    lost,
    mistakes,
    sharded,
    stock,
    tensor_parallel,
    undivided,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def clocks():
    """What was measured, by rank."""
    return run_workers(2, clock)


@pytest.mark.parametrize("loop", ["plain", "steps"])
def test_the_clock_reads_computing_alone(clocks, loop):
    """A rank that takes 20 ms, and waits for one at 200 ms in each layer, reads 20 and not 200."""
    fast, slow = clocks[0][loop, "given"]["compute_s"]

    # A tenth less than that at least: the first layer has no backward for its input.
    assert 0.9 * 20 * PER_SAMPLE_S[0] <= fast < 4 * 20 * PER_SAMPLE_S[0]
    assert 0.9 * 20 * PER_SAMPLE_S[1] <= slow < 1.3 * 20 * PER_SAMPLE_S[1]


@pytest.mark.parametrize("loop", ["plain", "steps"])
def test_the_times_are_right_enough_to_balance_by(clocks, loop):
    """Speeds of 10 : 1 make sizes of about 36 : 4; what is read as waiting keeps them equal."""
    fast, slow = clocks[0][loop, "auto"]["sizes"]

    assert fast + slow == 40
    assert 30 <= fast <= 39
    assert clocks[0][loop, "auto"]["warned"] == []


def test_a_rank_takes_no_more_forwards_than_it_needs(clocks):
    """None is there for the clock alone: one forward in a loop over steps, too."""
    assert all(set(found["steps", "auto"]["counts"]) == {1} for found in clocks)


def test_waits_in_collectives_of_the_script_are_not_seen_and_that_is_said(clocks):
    """Rather than balance by times that are mostly waiting."""
    found = clocks[0]["own", "auto"]

    assert len(found["warned"]) == 1
    assert "nothing is measured" in found["warned"][0]
    assert "`set_custom_all_gather`" in found["warned"][0]
    assert found["sizes"] == (20, 20)
    assert found["compute_s"] is None


@pytest.fixture(scope="module")
def lives():
    """What is whole at the hooks of a step, by rank."""
    return run_workers(2, alive)


@pytest.mark.parametrize(("loop", "sizes"), [("plain", 1), ("steps", 1), ("cut", 3)])
def test_no_parameter_or_gradient_is_whole_for_longer_than_without_us(lives, loop, sizes):
    """At each hook of each layer, forward and backward, in steps of several forwards too."""
    for rank, total in zip(lives, (14, 6), strict=True):
        assert rank[loop]["ours"] == [rank[loop]["theirs"]] * 2
        assert len(rank[loop]["sizes"]) == sizes  # of which one rank needs one
        assert sum(rank[loop]["sizes"]) == total


def test_a_size_grows_by_a_quarter_at_most_and_never_past_what_fits():
    """A speed of 10 : 1 asks for 36 of 40 at once, where 32 fit and running out ends all ranks."""
    fast, _ = run_workers(2, grown, 32)

    assert 28 <= max(fast) <= 32
    assert all(size <= 1.25 * max(fast[:step]) for step, size in enumerate(fast) if step)


@pytest.fixture(scope="module")
def refused():
    """Error texts by mistake."""
    return run_workers(2, mistakes)[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused(refused, mistake):
    """With the remedy, rather than a wrong gradient, a wrong time or a hang."""
    assert MISTAKES[mistake][1] in refused[mistake]


def test_evaluations_states_and_abandoned_steps_in_between():
    """Parameters kept whole during a step are given up after it: nothing trains on old ones."""
    assert max(run_workers(2, interrupted)[0]) <= 1e-12


def in_turn(rank):
    """Return the errors of a model that every other step leaves out, and steps in the one after."""
    errors = []
    x, y = samples(torch.float64).tensors
    with Balancer(policy=Fixed((11, 5)), bounds=Bounds(max=3), runtime=QUIET) as balancer:
        other, model, loader = balancer.prepare(sharded(), sharded(), stock())
        alone = network(torch.float64)
        both = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
        for number, step in enumerate(loader.steps()):
            for mine, classes in step:
                for used in (other, model)[: 2 - number % 2]:
                    functional.cross_entropy(used(mine), classes).backward()
            if number % 2:
                for one in both:
                    one.step()
                    one.zero_grad()
                continue
            part = slice(16 * number, 16 * number + 16)
            functional.cross_entropy(alone(x[part]), y[part]).backward()
            errors.append(float((flat(model) - flat(alone)).norm() / flat(alone).norm()))
    return errors


def test_a_model_that_a_step_leaves_out_may_take_its_own_step_there():
    """It was made whole with the others, before: what it trains on next is what it became."""
    assert max(run_workers(2, in_turn)[0]) <= 1e-12


def test_a_divide_factor_of_the_script_is_as_in_plain_fsdp2():
    """It adds no weight: 1 is a sum, of losses that are divided by the samples of all ranks."""
    assert max(run_workers(2, undivided)[0]) <= 1e-12


def test_hybrid_sharding_is_exact():
    """Sharded within pairs, replicated across them: the data-parallel ranks are all four."""
    assert max(run_workers(4, hybrid)[0]) <= 1e-12


@pytest.fixture(scope="module")
def four():
    """What two data-parallel by two tensor-parallel ranks found, by rank: 0 and 1 are peers."""
    return run_workers(4, tensor_parallel)


@pytest.mark.slow
def test_tensor_parallel_ranks_get_the_same_batches(four):
    """Under plans that change, and though each would draw an order of its own."""
    assert four[0]["seen"] == four[1]["seen"]
    assert four[2]["seen"] == four[3]["seen"]
    epoch = [number for rank in (0, 2) for step in four[rank]["seen"][:8] for number in step]
    assert sorted(epoch) == list(range(96))
    assert len(set(four[0]["sizes"])) > 1


@pytest.mark.slow
def test_only_the_data_parallel_dimension_is_balanced(four):
    """Two sizes that add up to the global batch, more for the faster pair, and exact gradients."""
    assert all(found["sizes"] == four[0]["sizes"] for found in four)
    assert all(sum(sizes) == 12 and len(sizes) == 2 for sizes in four[0]["sizes"])
    fast, slow = map(sum, zip(*four[0]["sizes"], strict=True))  # any one step may meet a pause
    assert fast > slow
    assert max(found["error"] for found in four) <= 1e-12


@pytest.mark.slow
def test_one_of_all_ranks_speaks(four):
    """The events of a run come once, from the first of the ranks that decide."""
    assert [found["events"] > 0 for found in four] == [True, False, False, False]


@pytest.mark.parametrize("steps", [True, False])
def test_a_killed_rank_is_named(steps, tmp_path):
    """Its peer waits in FSDP2's collectives then, whose error names a port."""
    found = run_workers(2, lost, steps, signal.SIGKILL, str(tmp_path), check=False)

    assert str(found[0]).startswith("1: Rank 1 on")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [True, False])
def test_a_stopped_rank_ends_those_that_wait_for_it(steps, tmp_path):
    """Their collective is broken off: they come out of it, and the error has the name."""
    found = run_workers(
        2, lost, steps, signal.SIGSTOP, str(tmp_path), check=False, stop_after=1, timeout_s=30
    )

    assert str(found[0]).startswith("1: Rank 1 on")
    assert "Rank 1 on" in (tmp_path / "0.log").read_text()
