"""Lightning's Trainer on uneven ranks trains what it trains in one process, by one callback."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from evenstep.lightning import BalanceCallback
from evenstep.testing import run_workers

from .._tiers import slow_but
from .fit_runs import (
    BALANCED,
    CASES,
    NUM_HELD_OUT,
    SAVED,
    Case,
    Scores,
    alone,
    balanced,
    decided,
    loaders,
    resumed,
    samples,
    saved,
    switched_off,
    trainer_of,
    twice,
)

pytestmark = pytest.mark.cluster


class Hooked(Scores):
    """Logs in hooks around a step, before it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = {name: [] for name in ("start", "after", "end", "val_end")}

    def tell(self, hook: str, name: str, value: torch.Tensor) -> None:
        self.log(name, value, on_step=True, on_epoch=False, sync_dist=True)
        self.told[name].append(self.trainer._results[f"{hook}.{name}"].value)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        return self.loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_start", "start", batch[0].mean())

    def on_after_backward(self) -> None:
        self.tell("on_after_backward", "after", self.loss.detach())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_end", "end", outputs["loss"])

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_validation_batch_end", "val_end", outputs)

    def on_validation_end(self) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        pass


def hooked(rank: int, world_size: int) -> dict[str, list[float]]:
    """Return what was logged in the hooks of each batch."""
    module = Hooked()
    callbacks = [BalanceCallback(**BALANCED)] if world_size > 1 else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of(world_size, callbacks).fit(module, *loaders(Case(), world_size))
    return {name: [float(value) for value in values] for name, values in module.told.items()}


class Gathers(Scores):
    """Gathers what has as many rows as a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        scores = self.net(x)
        self.all_gather(scores.detach())
        return functional.cross_entropy(scores, y)


class Unwrapped(DDPStrategy):
    """A strategy that trains the model in no DDP."""

    def _setup_model(self, model: nn.Module) -> Any:
        return model

    def _register_ddp_hooks(self) -> None:
        pass


MISTAKES = {
    "rows gathered": (Gathers, {}, "log with `sync_dist=True`"),
    "several loaders": (Scores, {"several": True}, "Join the data sets"),
    "too few held out": (Scores, {"held_out": 1}, "Evaluate more samples"),
    "no DDP": (Scores, {"strategy": Unwrapped()}, 'Use `Trainer(strategy="ddp")`'),
    "a part sharded": (
        partial(Scores, sharded=("net.layers.0",)),
        {"strategy": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)},
        "Write `fully_shard(self.model, mesh=self.device_mesh['data_parallel'])`",
    ),
}


def mistakes(rank: int) -> dict[str, str]:
    """Return the error's text of every mistake, one fit after the other."""
    texts = {}
    for name, (kind, options, _) in MISTAKES.items():
        train, held_out = loaders(Case(), 2)
        given = dict(options)
        several = given.pop("several", False)
        if (count := given.pop("held_out", None)) is not None:
            held_out = DataLoader(samples(count, 2))
        trainer = trainer_of(2, [BalanceCallback(**BALANCED)], **given)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer.fit(kind(), {"a": train, "b": train} if several else train, held_out)
        except ValueError as error:
            texts[name] = str(error)
    return texts


class Dying(Scores):
    """Ends one process without a word."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            os._exit(1)
        return super().training_step(batch, batch_idx)


def losing(rank: int) -> str:
    """Return the error that a rank ends with once another one is gone."""
    trainer = trainer_of(2, [BalanceCallback(**BALANCED)])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Dying(), *loaders(Case(), 2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


FIRST = next(iter(CASES))
RUNS = [(2, FIRST), *((3, name) for name in CASES)]


@pytest.fixture(scope="module")
def runs():
    """Each case on so many ranks, beside one process; made when it is first asked for."""
    found = {}

    def run(world_size, name):
        if (world_size, name) not in found:
            ours = run_workers(world_size, balanced, world_size, name)
            found[world_size, name] = ours, alone(name)
        return found[world_size, name]

    return run


def distance(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("world_size", "name"), slow_but([(2, FIRST)], RUNS))
def test_it_ends_where_one_process_ends(runs, world_size, name):
    """Parameters agree to rounding, after as many steps, under plans that change at each."""
    ranks, theirs = runs(world_size, name)
    for ours in ranks:
        assert len(set(ours.sizes)) > 2
        assert ours.num_steps == theirs.num_steps
        assert distance(ours.parameters, theirs.parameters) <= 1e-9


@pytest.mark.parametrize(("world_size", "name"), slow_but([(2, FIRST)], RUNS))
def test_what_is_logged_is_what_one_process_logs(runs, world_size, name):
    """Of steps and of epochs, in training and validation, on every rank."""
    ranks, theirs = runs(world_size, name)
    for ours in ranks:
        for kind, values in theirs.told.items():
            assert ours.told[kind] == pytest.approx(values, rel=1e-9), kind


@pytest.mark.slow
def test_what_hooks_log_is_what_one_process_logs():
    """With `sync_dist=True`, before a step, within it and after it, in validation too."""
    theirs = hooked(0, 1)
    for ours in run_workers(2, hooked, 2):
        for name, values in theirs.items():
            assert ours[name] == pytest.approx(values, rel=1e-9), name


def test_each_held_out_sample_is_validated_once(runs):
    """In each of two validations, over all ranks."""
    ranks, _ = runs(2, FIRST)

    assert sum(ours.num_validated for ours in ranks) == 2 * NUM_HELD_OUT


@pytest.mark.slow
@pytest.mark.parametrize(("where", "world_size"), [*((where, 2) for where in SAVED), ("within", 3)])
def test_it_goes_on_where_a_checkpoint_was_saved(tmp_path, where, world_size):
    """By Lightning itself, with what was learnt, also on another number of ranks."""
    whole = run_workers(2, saved, 2, str(tmp_path), where)[0]
    for found in run_workers(world_size, resumed, world_size, str(tmp_path), where):
        assert 3 <= len(found["fitted"].sizes) < len(whole.sizes)
        assert found["fitted"].num_steps == whole.num_steps
        assert len(found["saved"]) == 2
        assert distance(found["fitted"].parameters, whole.parameters) <= 1e-9


@pytest.mark.slow
def test_a_balanced_checkpoint_is_no_trap_for_a_plain_trainer(tmp_path):
    """Which begins the epoch again, as with any loader that has no state."""
    where = "within, asked late"
    run_workers(2, saved, 2, str(tmp_path), where)
    for found in run_workers(2, resumed, 2, str(tmp_path), where, True):
        assert found["fitted"].num_steps == 10


@pytest.mark.slow
def test_switched_off_it_is_lightning_itself():
    """`EVENSTEP=off`: the parameters and logs of a plain trainer, bit for bit."""
    for plain, ours in run_workers(2, switched_off):
        assert ours.parameters.equal(plain.parameters)
        assert ours.told == plain.told


@pytest.mark.slow
def test_a_trainer_fits_again_and_is_left_as_it_was():
    """One callback for several fits, with plain validations between and after."""
    for found in run_workers(2, twice):
        assert len(found["loss"]) == 10
        assert all(found["sizes"])
        assert found["patches"] == []
        assert found["hooks"] == 0


@pytest.mark.slow
def test_ranks_decide_within_a_step():
    """What a step asks for by itself is there at once; what it logs is reduced later."""
    for found in run_workers(2, decided):
        assert found == [3.0] * 5


@pytest.mark.slow
def test_what_cannot_be_balanced_is_refused_on_every_rank():
    """With the remedy; the next fit of the process begins anew."""
    for texts in run_workers(2, mistakes):
        for name, (_, _, remedy) in MISTAKES.items():
            assert remedy in texts[name]


@pytest.mark.slow
def test_a_lost_rank_is_named():
    """By the error that ends the fit on the others."""
    text = run_workers(2, losing, check=False, stop_after=2)[0]

    assert text.startswith("WorkerLostError: Rank 1 ")
