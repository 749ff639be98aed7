"""Loops as people write them: the gradient stays right, the clock clean, the errors clear."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import weight_norm
from torch.utils.checkpoint import checkpoint

from evenstep.exceptions import EvenstepWarning
from evenstep.policies import Fixed
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime
from evenstep.torch._model._compiled import OuterHooks

from .hard_loops import LOOPS as HARD_LOOPS
from .hard_loops import WRAPS, found_in, warnings_of_left_steps
from .loops import (
    BATCH_SIZE,
    LOOPS,
    errors_of,
    lines_warned_of,
    model,
    stock,
    warnings_of_loops,
    warnings_of_others,
)

pytestmark = pytest.mark.cluster


def said_of(name: str, begin: int) -> list[str]:
    """Return what is said of a loop of 14 steps in which something begins at a step."""
    runtime = Runtime(line_every=None, deadline_s=6.0)
    critic = DistributedDataParallel(nn.Linear(4, 2).double())
    with (
        Balancer(policy=Fixed((14, 6)), runtime=runtime) as balancer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        parts = DistributedDataParallel(model()), stock(14 * 2 * BATCH_SIZE)
        ddp, loader = balancer.prepare(*parts)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (ddp, critic)]
        for step, (x, _) in enumerate(loader):
            has_begun = step >= begin
            loss = ddp(x).square().mean()
            if name == "part" and has_begun:
                loss = loss + ddp.module[0](x).abs().mean()
            if name == "backward" and has_begun:
                loss.backward(retain_graph=True)
            loss.backward()
            optimizers[0].step()
            if name == "critic" and has_begun:
                critic(x).square().mean().backward()
                optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return [str(one.message) for one in caught if one.category is EvenstepWarning]


def warnings_of_late(rank: int) -> dict[str, list[str]]:
    """Return what is said of loops in which something begins after the first steps."""
    return {name: said_of(name, 6) for name in ("critic", "part", "neither")}


def warnings_between_looks(rank: int) -> dict[str, list[str]]:
    """Return what is said of what begins at step 11, when no look is due before step 16."""
    return {name: said_of(name, 11) for name in ("critic", "backward", "part")}


WORDS = "beside the model's output"


class Experts(nn.Module):
    """A layer that keeps a loss, its activations and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.losses: list[torch.Tensor] = []
        self.state: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.gate(x) + self.state)
        self.losses[:] = [hidden.mean(0).square().sum()]
        self.balance, self.seen = self.losses[0] * 1, hidden
        return self.last(hidden)


class Gathering(nn.Module):
    """A model that adds up what its layers keep."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.layer.balance


class Scaled(nn.Module):
    """A layer, and a scale that it may read in what is made again in the backward."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.gate, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(()))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.gate(x)
        if self.reads:
            out = checkpoint(lambda given: given * self.scale, out, use_reentrant=True)
        return out


class Loop(NamedTuple):
    """A model, and its loss beside that of the output."""

    loss: Callable[[nn.Module, torch.Tensor, list[Any]], Any]
    make: Callable[[], nn.Module] = Experts
    hook: Callable[[list[Any]], Callable[..., None]] | None = None
    retained: bool = False


def keeps(kept: list[Any]) -> Callable[..., None]:
    return lambda module, given, out: kept.append(out)


def retains(kept: list[Any]) -> Callable[..., None]:
    def hook(module: nn.Module, given: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    return hook


def normed() -> nn.Module:
    model = Experts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight_norm(model.gate)
    return model


def carried(model: nn.Module, out: torch.Tensor, kept: list[Any]) -> Any:
    """A second forward reads what the first has left."""
    inner = model.module
    inner.state = inner.seen.mean()
    loss = model(torch.ones(len(out), 4, dtype=torch.float64)).square().mean()
    inner.state = 0.0
    return loss


BESIDE = {
    "a loss on a module": Loop(lambda model, out, kept: model.module.balance),
    "a loss in a list": Loop(lambda model, out, kept: model.module.losses[0]),
    "activations on a module": Loop(lambda model, out, kept: model.module.seen.abs().mean()),
    "features of a hook": Loop(lambda model, out, kept: kept[0].abs().mean(), hook=keeps),
    "a scale": Loop(
        lambda model, out, kept: model.module.scale * out.abs().mean(),
        make=partial(Scaled, reads=False),
    ),
}
WITHIN = {
    "kept and not used": Loop(lambda model, out, kept: 0.0, hook=keeps),
    "kept and looked at": Loop(
        lambda model, out, kept: float(model.module.balance + kept[0].sum()) * 0, hook=keeps
    ),
    "its gradient retained": Loop(lambda model, out, kept: 0.0, hook=retains, retained=True),
    "gathered in the forward": Loop(lambda model, out, kept: 0.0, make=Gathering),
    "a weight that is computed": Loop(lambda model, out, kept: 0.0, make=normed),
    "carried into another forward": Loop(carried),
    "read again in the backward": Loop(
        lambda model, out, kept: 0.0, make=partial(Scaled, reads=True)
    ),
}


def said_beside(loop: Loop) -> list[str]:
    """Return what is said of three steps of a loop."""
    torch.manual_seed(0)
    plain, kept = loop.make().double(), []
    if loop.hook is not None:
        plain.gate.register_forward_hook(loop.hook(kept))
    runtime = Runtime(line_every=None, deadline_s=6.0)
    with (
        Balancer(policy=Fixed((14, 6)), runtime=runtime) as balancer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        parts = DistributedDataParallel(plain), stock(6 * BATCH_SIZE)
        model, loader = balancer.prepare(*parts)
        for x, _ in loader:
            kept.clear()
            out = model(x)
            (out.square().mean() + loop.loss(model, out, kept)).backward()
            assert not loop.retained or kept[0].grad is not None
    said = [str(one.message) for one in caught if one.category is EvenstepWarning]
    return [text for text in said if WORDS in text]


def warnings_beside(rank: int) -> dict[str, list[str]]:
    return {name: said_beside(loop) for name, loop in (BESIDE | WITHIN).items()}


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
        "weights_first": 0,
        "decay_apart": 0,
        "retained_without_sync": 0,
        "part_alone": 1,
        "part_first": 0,
        "part_unused": 0,
        "part_attacked": 0,
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
    """On a module, given to a hook, or a parameter: not without a gradient, or by the output."""
    said = run_workers(2, warnings_beside)[0]

    assert {name: len(texts) for name, texts in said.items()} == {
        name: int(name in BESIDE) for name in (*BESIDE, *WITHIN)
    }


def test_a_step_that_is_left_before_its_last_micro_batch_is_warned_of_once():
    """Its gradients were not averaged; not where there are none."""
    assert run_workers(2, warnings_of_left_steps)[0] == {True: 1, False: 0}


def without_steps(rank: int) -> list[str]:
    """Return what is logged of a run whose loop never begins."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("evenstep").addHandler(handler)
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        balancer.prepare(model(), stock(4 * 2 * BATCH_SIZE))
    return logged


def test_a_run_without_a_step_ends_without_a_loss():
    """The rank that ends first was said to be lost, with the advice to restart."""
    assert run_workers(2, without_steps) == [[], []]


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
    around = OuterHooks(module, first=called, before=called)
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
