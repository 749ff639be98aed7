"""`Trainer` on uneven ranks trains what it trains in one process, whoever weights the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from evenstep.testing import run_workers
from evenstep.torch import Runtime

from .._tiers import Groups, slow_but
from .small import Pairs, Sentences, TwoTexts, distance, offline, two_texts
from .trainer_runs import (
    CASES,
    STOCK,
    WORLD_SIZE,
    Case,
    alone,
    beside,
    counted,
    in_single,
    in_single_alone,
    make,
    on_the_cluster,
    resumed,
    resumed_by_length,
    run,
    stock_alone,
    stock_on_the_cluster,
    switched_off,
)

pytestmark = pytest.mark.cluster


def own_step(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """Train on a batch as many scripts do, without `compute_loss`."""
    loss = model(**trainer._prepare_inputs(inputs))["loss"]
    trainer.accelerator.backward(loss)
    return loss.detach()


class Endless(IterableDataset):
    """Sentences without end."""

    def __init__(self, num_samples: int, *, masked: bool) -> None:
        self.sentences = Sentences(num_samples, masked=masked)

    def __iter__(self) -> Any:
        while True:
            yield from map(self.sentences.__getitem__, range(len(self.sentences)))


def generated(trainer: Any, batch: Any) -> Any:
    """Return samples that are made of a batch for several steps, as TRL's GRPO does."""
    from transformers import Trainer

    if trainer.state.global_step % 2 == 0:
        trainer.buffer = Trainer._prepare_inputs(trainer, batch)
    return trainer.buffer


class Repeated(Sampler):
    """Each sample twice in a row, for groups of generations, as TRL's `RepeatSampler`."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return 2 * self.num_samples

    def __iter__(self) -> Any:
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(7))
        return (index for index in order.tolist() for _ in range(2))


def repeated(trainer: Any, dataset: Any = None) -> Any:
    """Return the sampler of a trainer that generates several answers to each prompt."""
    return Repeated(len(trainer.train_dataset))


def own_loader(trainer: Any) -> Any:
    """Return a loader of the script's own, as where it draws by weights."""
    return trainer.accelerator.prepare(DataLoader(trainer.train_dataset, batch_size=2))


def refused(rank: int, folder: str) -> dict[str, str]:
    """Return the errors of trainers that are set up for what is not balanced."""
    offline(folder)
    found = {}
    for name, case, balancing, more in (
        ("auto_find_batch_size", Case(), {}, {"auto_find_batch_size": True}),
        ("average_tokens", Case(), {}, {"average_tokens_across_devices": False}),
        ("global_batch_size", Case(), {"global_batch_size": 6}, {}),
        ("loss_reduction", Case(), {"loss_reduction": "sum"}, {}),
        ("unit", Case(), {"unit": "tokens"}, {}),
        ("process_group", Case(), {"runtime": Runtime(process_group=object())}, {}),
        ("pairs", Case(Pairs), {}, {}),
        (
            "pairs in mappings",
            Case(TwoTexts, collator=lambda: two_texts),
            {},
            {"remove_unused_columns": False},
        ),
        ("stream", Case(data=Endless, more={"max_steps": 3}), {}, {}),
        ("generated", Case(behind={"_prepare_inputs": generated}), {}, {}),
        ("repeated", Case(behind={"_get_train_sampler": repeated}), {}, {}),
        ("own step", Case(behind={"training_step": own_step}), {}, {}),
        ("own step before", Case(before={"training_step": own_step}), {}, {}),
        ("own loader before", Case(before={"get_train_dataloader": own_loader}), {}, {}),
    ):
        try:
            run(make(folder, case, balancing=balancing, **more))
        except ValueError as error:
            found[name] = str(error)
    return found


FIRST, FIRST_STOCK = ("targets masked, tokens counted",), ("classifier",)


def _ranks(rank, folder, names, stock):
    return on_the_cluster(rank, folder, names) | stock_on_the_cluster(rank, folder, stock)


def _one_process(rank, folder, names, stock):
    return alone(rank, folder, names) | stock_alone(rank, folder, stock)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each case, as the ranks train it and as one process does; models as they are come last.

    Those log their loss at every fifth step of 18.
    """

    def run(cases):
        folder = str(tmp_path_factory.mktemp("trainer"))
        tables = [[name for name in table if name in cases] for table in (CASES, STOCK)]
        ranks = run_workers(WORLD_SIZE, _ranks, folder, *tables, timeout_s=170)
        theirs = run_workers(1, _one_process, folder, *tables)[0]
        return {name: ([rank[name] for rank in ranks], theirs[name]) for name in cases}

    return Groups((*FIRST, *FIRST_STOCK), (*CASES, *STOCK), run)


@pytest.mark.parametrize("name", slow_but(FIRST, CASES))
def test_it_ends_where_one_process_ends(runs, name):
    """Parameters agree to rounding, under plans that change at every step."""
    (ours, *_), theirs = runs[name]

    assert len(set(ours.sizes)) > 2
    assert len(ours.losses) == len(theirs.losses) >= 6
    assert distance(ours.parameters, theirs.parameters) <= 1e-9


@pytest.mark.slow
def test_switched_off_it_is_trainer_itself(tmp_path):
    """`EVENSTEP=off`: the parameters and losses of the stock class, bit for bit."""
    for plain, ours, sizes in run_workers(2, switched_off, str(tmp_path)):
        assert ours.parameters.equal(plain.parameters)
        assert ours.losses == plain.losses
        assert sizes == ()


@pytest.mark.parametrize("name", slow_but(FIRST, CASES))
def test_the_log_says_what_it_says_in_one_process(runs, name):
    """The loss of every step is that of the global batch, and the rates are those of its steps."""
    (ours, *_), theirs = runs[name]

    assert ours.rates == theirs.rates
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


@pytest.mark.parametrize("name", slow_but(FIRST_STOCK, STOCK))
def test_a_stock_model_ends_where_one_process_ends(runs, name):
    """Whether its loss listens to `num_items_in_batch` or not, and without a setting."""
    (ours, *_), theirs = runs[name]

    assert len(set(ours.sizes)) > 2
    assert distance(ours.parameters, theirs.parameters) <= 1e-9
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)


@pytest.mark.parametrize("name", slow_but(FIRST_STOCK, STOCK))
def test_the_loss_of_the_whole_training_is_that_of_one_process(runs, name):
    """On every rank, steps after the last log included."""
    ranks, theirs = runs[name]
    for rank in ranks:
        assert rank.train_loss == pytest.approx(theirs.train_loss, rel=1e-9)


@pytest.mark.slow
def test_rows_are_gathered_from_all_ranks(runs):
    """As many as the global batch has, though ranks have unlike numbers of them."""
    ranks, theirs = runs["causal, rows gathered"]

    assert len(theirs.gathered) == 6
    for rank in ranks:
        assert rank.gathered == theirs.gathered


@pytest.mark.parametrize("name", slow_but(FIRST, (*FIRST, "accumulation, tokens counted")))
def test_tokens_are_counted_once(runs, name):
    """Each token of both epochs counts, and no stand-in's does; also between the accumulated."""
    (ours, *_), theirs = runs[name]

    assert ours.tokens == theirs.tokens == 2 * 50 * 8


@pytest.mark.slow
def test_metrics_count_what_is_trained_on(tmp_path):
    """No forward that only finds out, or that is made as other ranks have more; on every rank."""
    for tokens, counted_rows, rows in run_workers(WORLD_SIZE, counted, str(tmp_path)):
        assert tokens == 8 * len(rows)
        assert counted_rows == rows


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint(tmp_path):
    """Resumed within an epoch, training ends where it ends unbroken, dropout by sample included."""
    found = run_workers(WORLD_SIZE, resumed, str(tmp_path))[0]

    assert len(found["first"].losses) == 7
    assert found["resumed"].losses == pytest.approx(found["unbroken"].losses, rel=1e-6)
    assert distance(found["resumed"].parameters, found["unbroken"].parameters) <= 1e-9
    # The epoch under way from its start instead, if that is asked for: other samples.
    assert distance(found["epoch anew"].parameters, found["unbroken"].parameters) > 1e-6


@pytest.mark.slow
def test_it_goes_on_in_an_order_that_torch_draws(tmp_path):
    """As plain Trainer does in its first epoch: the restart draws no other numbers before it."""
    whole, again = run_workers(2, resumed_by_length, str(tmp_path))[0]

    assert distance(again, whole) <= 1e-9


@pytest.mark.slow
def test_in_single_precision_it_is_no_further_off_than_plain_trainer(tmp_path):
    """Rounding moves the balanced run from one process at most 3 times as far as a plain one."""
    cluster = run_workers(WORLD_SIZE, in_single, str(tmp_path))[0]
    reference = run_workers(1, in_single_alone, str(tmp_path))[0]

    assert distance(cluster["balanced"], reference) <= 3 * distance(cluster["plain"], reference)


@pytest.mark.slow
def test_what_cannot_be_balanced_is_refused(tmp_path):
    """Each setting that would go wrong raises, names itself, and says what to do."""
    found = run_workers(2, refused, str(tmp_path))[0]
    said = {
        "auto_find_batch_size": "`TrainingArguments(auto_find_batch_size=...)` must be False",
        "average_tokens": "`TrainingArguments(average_tokens_across_devices=...)` must be True",
        "global_batch_size": "leave out 'global_batch_size'",
        "loss_reduction": "leave out 'loss_reduction'",
        "unit": "`BalancedTrainer(balancing=...)` must leave out 'unit'",
        "process_group": "leave out `Runtime(process_group=...)`",
        "pairs": "must have a loss that is divided by `num_items_in_batch`",
        "pairs in mappings": "must have a loss that is divided by `num_items_in_batch`",
        "stream": "a Endless, which is a stream. Load it whole, as by `load_dataset(...,",
        "generated": "`BalancedTrainer._prepare_inputs(...)` must be left to Trainer",
        "repeated": "got a Repeated that repeats each:",
        "own step": "`BalancedTrainer.training_step(...)` must get its loss from",
        "own step before": "`class BalancedTrainer(BalancedMixin, OwnTrainer)`",
        "own loader before": "`BalancedTrainer.get_train_dataloader()` must be left to",
    }

    assert found.keys() == said.keys()
    assert [name for name, text in said.items() if text not in found[name]] == []


@pytest.mark.slow
def test_the_rest_of_trainer_stays(tmp_path):
    """Evaluation runs between epochs, loaders for others are Trainer's, runs repeat.

    A callback that looks into the training data gets this rank's half of the 12 samples.
    """
    found = run_workers(2, beside, str(tmp_path))[0]

    assert found["outside"] == "DataLoaderShard"
    assert found["balancer before"] is None
    assert found["looked at"] == [2, 6, 6, 6, 6]
    assert len(found["evaluations"]) == 2
    assert found["again"] > 0
