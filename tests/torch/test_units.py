"""Means over other things than samples: exact weights, asked for in the backward alone."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from evenstep.testing import WorkerFailed, run_workers
from evenstep.torch import Balancer

from .unit_runs import (
    QUIET,
    die_while_counting,
    forward_first,
    leave_while_counting,
    nothing_to_average,
    running_stats,
)
from .units import CASES, CONTROLS, amp_errors, errors_of, pairs


@pytest.fixture(scope="module")
def found():
    """What three ranks found in fp64, by rank and case, under plans that change at every step."""
    return run_workers(3, errors_of)


@pytest.mark.cluster
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_one_process(found, case):
    """1e-12 in fp64, a short last step with a rank that has a stand-in included."""
    assert found[0][case]["gradient"] <= 1e-12


@pytest.mark.cluster
@pytest.mark.parametrize(
    "case", [name for name in CASES if "micro" not in name and "sum" not in name]
)
def test_the_logged_loss_is_that_of_one_process(found, case):
    """`balancer.mean(loss)` counts units too, and leaves out who has none."""
    assert found[0][case]["loss"] <= 1e-12


@pytest.mark.cluster
@pytest.mark.parametrize("case", CONTROLS)
def test_samples_as_the_unit_would_be_another_gradient(found, case):
    """The control: the same comparison fails by far."""
    assert found[0][f"control: {case}"]["gradient"] > 0.07


@pytest.mark.cluster
def test_the_cases_are_what_they_are_called(found):
    """A rank with samples and without targets, a step without any, a stand-in not counted."""
    alone = [found[rank]["a rank without targets"]["counts"][1] for rank in range(3)]
    dead = [found[rank]["no targets at all"]["counts"][1] for rank in range(3)]
    tail = [found[rank]["ignored targets"]["counts"][3] for rank in range(3)]

    assert alone[0] == (14, 0.0)
    assert all(units > 0 for _, units in alone[1:])
    assert all(samples > 0 and units == 0.0 for samples, units in dead)
    assert (0, None) in tail  # the function never saw the stand-in


@pytest.mark.cluster
def test_half_precision_is_as_exact_as_at_the_equal_split():
    """1.2 times its error, over an epoch."""
    ours, equal = run_workers(3, amp_errors)[0]

    assert ours <= 1.2 * equal


@pytest.mark.cluster
def test_a_forward_waits_for_nobody():
    """Rank 1 counts once rank 0's forward is done; rank 0's backward knows what it counted."""
    assert run_workers(2, forward_first)[0] == pytest.approx(1.0 / (1.0 + 3.0))


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_never_tells_is_named(how):
    """Who waits for its units gets an error, not a hang."""
    results = run_workers(3, die_while_counting, how, timeout_s=30, check=False)

    assert isinstance(results[1], WorkerFailed) or "a bug in the user's count" in results[1][0]
    for rank in (0, 2):
        message, named = results[rank]
        assert named == 1
        assert "Rank 1 on " in message


@pytest.mark.cluster
def test_a_rank_that_leaves_is_named():
    """Whoever ends its run before it told its units is missed by the others."""
    results = run_workers(3, leave_while_counting, timeout_s=30)

    assert results[1] == ("left", 1)
    for rank in (0, 2):
        assert "it ended its run after step 1, others are at 2" in results[rank][0]


@pytest.mark.cluster
@pytest.mark.parametrize("broadcast", [False, True])
def test_running_statistics_are_the_mean_by_counts(broadcast):
    """On all ranks alike, by what was seen since the last call; another call changes nothing."""
    results = run_workers(3, running_stats, broadcast)
    counts = torch.tensor([each["counts"] for each in results]).double()

    weights = counts[:, -1] if broadcast else counts.sum(1)
    weights = weights / weights.sum()
    wanted = sum(weight * each["before"] for weight, each in zip(weights, results, strict=True))

    assert counts.shape == (3, 3)
    assert not torch.equal(counts[:, -1], counts.mean(1))  # else one rule would do as well
    for each in results:
        torch.testing.assert_close(each["after"], wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(each["again"], each["after"], rtol=1e-6, atol=1e-6)
        assert torch.equal(each["after"], results[0]["after"])
        assert (each["before"] - each["after"]).abs().max() > 0.1
        assert each["tracked"] == 7


def test_averaging_before_prepare_is_refused():
    """There is no model yet."""
    assert "between `prepare` and `close`" in nothing_to_average(0)


def test_alone_running_statistics_stay_bit_by_bit():
    """One process has nobody to average with."""
    norm = nn.BatchNorm1d(6)
    with Balancer(runtime=QUIET) as balancer:
        model, loader = balancer.prepare(
            nn.Sequential(norm, nn.Linear(6, 1)).double(), DataLoader(pairs(), batch_size=24)
        )
        for x, _ in loader:
            model(x).mean().backward()
        before = norm.running_mean.clone()
        balancer.average_buffers()

    assert torch.equal(norm.running_mean, before)
