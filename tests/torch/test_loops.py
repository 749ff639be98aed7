"""Loops as people write them: the gradient stays right, the clock clean, the errors clear."""

import copy
import io

import pytest
import torch
from torch import nn

from evenstep.testing import run_workers
from evenstep.torch._model._compiled import Surround

from .beside_output import BESIDE, WITHIN, warnings_beside
from .hard_loops import LOOPS as HARD_LOOPS
from .hard_loops import WRAPS, found_in, warnings_of_left_steps
from .late_loops import warnings_between_looks, warnings_of_late
from .loops import (
    LOOPS,
    errors_of,
    lines_warned_of,
    warnings_of_loops,
    warnings_of_others,
)

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def found():
    """Relative gradient errors and what else each loop had to say, on rank 0 of two."""
    return run_workers(2, errors_of)[0]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_gradient_is_exact(found, loop):
    """1e-12 against one process, in every step that was looked at."""
    assert found[loop]["error"] <= 1e-12


def test_several_backwards_do_not_count_each_others_waits(found):
    """A rank at 10 ms a backward is not taken for one at 30, whatever it waits for in between."""
    fast, slow = found["two backwards"]["compute_s"]

    assert fast < 0.6 * slow


def test_what_is_not_reduced_or_not_weighted_is_warned_of_once():
    """Ranks train apart after a second backward; a part by itself has no weight."""
    said = run_workers(2, warnings_of_loops)[0]

    assert {loop: len(texts) for loop, texts in said.items()} == {
        "retained": 1,
        "forwards_first": 1,
        "input_first": 0,
        "decay_apart": 0,
        "retained_without_sync": 0,
        "part_alone": 1,
        "part_first": 0,
        "part_unused": 0,
        "part_again": 0,
    }


def test_a_warning_points_to_the_line_of_the_script():
    """Not to one of evenstep or torch, whose hooks have noticed it."""
    said = run_workers(2, lines_warned_of)[0]

    assert said == [
        "out.abs().mean().backward()",
        "(ddp(x).square().mean() + ddp.module[0](x).abs().mean()).backward()",
    ]


def test_a_model_that_was_not_prepared_and_is_trained_is_warned_of_once():
    """Not where the weight is 1, or its gradient came through the model, or by no backward."""
    said = run_workers(2, warnings_of_others)[0]

    assert {case for case, count in said.items() if count} == {
        ("head_beside", False),
        ("critic_beside", False),
    }
    assert max(said.values()) == 1


def test_what_begins_late_is_warned_of_too():
    """A critic that first steps at step 6, and a part that is called from then on."""
    said = run_workers(2, warnings_of_late)[0]

    assert [len(texts) for texts in said.values()] == [1, 1, 0]
    assert "belong to no prepared model" in said["critic"][0]
    assert "was called outside of the model" in said["part"][0]


def test_an_optimizer_is_looked_at_in_its_first_step_whenever_that_is():
    """A second backward at any step; a part that is called from then on, only in looks."""
    said = run_workers(2, warnings_between_looks)[0]

    assert {name: len(texts) for name, texts in said.items()} == {
        "critic": 1,
        "backward": 1,
        "part": 0,
    }


def test_terms_that_a_forward_makes_beside_its_output_are_warned_of_once():
    """On a module, or given to a hook: not where no gradient comes through, or by the output."""
    said = run_workers(2, warnings_beside)[0]

    assert {name: len(texts) for name, texts in said.items()} == {
        name: int(name in BESIDE) for name in (*BESIDE, *WITHIN)
    }


def test_a_step_that_is_left_before_its_last_micro_batch_is_warned_of_once():
    """Its gradients were not averaged; not where there are none."""
    assert run_workers(2, warnings_of_left_steps)[0] == {True: 1, False: 0}


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("after close", "The balancer was closed"),
        ("other group", "must average gradients over the balancer's ranks"),
        ("short tail", "have 2 samples for each of 2 ranks in its last step"),
        ("forward alone", "Run forwards whose gradient is not used without gradients"),
    ],
)
def test_a_mistake_is_refused(found, mistake, message):
    """With the remedy, rather than a wrong gradient or a hang."""
    assert message in found[mistake]["text"]


def test_a_users_own_error_stays_his_own(found):
    """An error outside of any collective is not blamed on a rank that ended its run."""
    assert found["own error"]["text"] == "RuntimeError: my own mistake"


def test_a_collective_before_the_plan_point_stalls_once_at_most(found):
    """Ranks with unlike numbers of backwards, and a logged mean after them: no waiting for both."""
    assert found["uneven backwards"]["seconds"] < 5


def test_a_model_with_buffers_can_be_copied_and_written():
    """With hooks on it too, of which nothing is left in the copy."""
    module = nn.BatchNorm1d(2)
    called = [lambda module, inputs, keywords: pytest.fail("it was called")]
    around = Surround(module, first=called, before=called)
    around.place()
    written = io.BytesIO()
    torch.save(module, written)
    written.seek(0)

    for made in (copy.deepcopy(module), torch.load(written, weights_only=False)):
        assert made(torch.ones(2, 2)).shape == (2, 2)


@pytest.fixture(scope="module")
def hard():
    """What the harder loops found, by loop and wrapper, on rank 0 of three."""
    return run_workers(3, found_in)[0]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("loop", HARD_LOOPS)
def test_scalers_and_recomputed_activations_are_exact(hard, loop, wrap):
    """1e-12 against one process: gradients, or parameters at the end where steps build on steps."""
    assert hard[loop, wrap]["error"] <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(hard, wrap):
    """The scaler's choice is that of one process with the whole batch."""
    ours, theirs = hard["scaler", wrap]["scales"]

    assert hard["scaler", wrap]["skipped"] == [False, True, False, False]
    assert ours == theirs


@pytest.mark.slow
def test_compressed_gradients_are_weighted_before(hard):
    """As near as at the equal split, where the hook rounds to half precision as well."""
    assert 1e-5 < hard[False] < 0.02
    assert hard[True] < 2 * hard[False]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_recomputed_activations_leave_the_clock_clean(hard, kind, wrap):
    """A rank waits 0.1 s for another that sleeps so long, and reads a fraction of it."""
    slow, *fast = hard[kind, wrap]["compute_s"]

    assert slow >= 0.1
    assert max(fast) < 0.5 * slow
