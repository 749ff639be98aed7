"""Runs of `Trainer`: balanced on a cluster, plain on it, and plain in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from evenstep.huggingface import BalancedMixin
from evenstep.policies import Equal
from evenstep.torch import Runtime

from ..torch.plans import Restless
from .losses import counting_loss, loss_of_a_tuple, own_loss, row_gathering_loss, summed_loss
from .small import (
    Classified,
    Deaf,
    FirstWhole,
    Plain,
    Scored,
    Sentences,
    bert,
    buffered,
    flat,
    gpt,
    gpt_in_double,
    in_a_tuple,
    offline,
    unkeyed,
)

QUIET = Runtime(line_every=None)
WORLD_SIZE = 3


@dataclass(frozen=True)
class Case:
    """A training, of which every optimizer step takes 3 ranks x batch_size x num_accumulated."""

    model: Callable[[], Any] = gpt_in_double
    batch_size: int = 2
    num_accumulated: int = 1
    num_samples: int = 50  # 8 batches of 6, and one of 2
    masked: bool = True
    data: Callable[..., Any] = Sentences
    loss: Callable[..., Any] | None = None  # of a trainer's own, in the place of `compute_loss`
    collator: Callable[[], Any] | None = None
    before: dict[str, Any] = field(default_factory=dict)  # methods in a class before the mixin
    behind: dict[str, Any] = field(default_factory=dict)  # and in one that it comes before
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "targets masked, tokens counted": Case(more={"include_num_input_tokens_seen": "all"}),
    "accumulation, the last step short": Case(num_accumulated=2, masked=False),
    "accumulation, drop_last": Case(num_accumulated=3, more={"dataloader_drop_last": True}),
    "more batches than samples": Case(batch_size=1, num_accumulated=4),
    "accumulation, tokens counted": Case(
        buffered, batch_size=1, num_accumulated=4, more={"include_num_input_tokens_seen": "all"}
    ),
    "mean loss, max_steps": Case(Plain, more={"max_steps": 12}),
    "mean loss, accumulation": Case(Plain, num_accumulated=2, num_samples=48),
}


SELDOM = {"logging_steps": 5, "optim": "sgd"}  # of 18 or 10 steps, which 5 does not divide or does
STOCK = {
    "causal": Case(more=SELDOM),
    "classifier": Case(
        partial(bert, "BertForSequenceClassification", 3), data=Classified, more=SELDOM
    ),
    "regression": Case(partial(bert, "BertForSequenceClassification", 1), data=Scored, more=SELDOM),
    "regression over all items": Case(
        partial(bert, "BertForSequenceClassification", 1),
        data=Scored,
        loss=summed_loss,
        more={**SELDOM, "max_grad_norm": 0.0, "learning_rate": 1e-4},
    ),
    "classifier of tokens": Case(partial(bert, "BertForTokenClassification", 23), more=SELDOM),
    "masked model": Case(partial(bert, "BertForMaskedLM", 2), more=SELDOM),
    "causal, a loss of one's own": Case(loss=own_loss, more=SELDOM),
    "causal, no padding in the first batch": Case(
        loss=own_loss, data=FirstWhole, more={**SELDOM, "train_sampling_strategy": "sequential"}
    ),
    "causal, rows gathered": Case(  # never so few that a rank has a stand-in
        loss=row_gathering_loss, batch_size=16, num_samples=144, more=SELDOM
    ),
    "another mean": Case(Deaf, more=SELDOM),
    "batches in tuples": Case(
        Deaf,
        loss=loss_of_a_tuple,
        collator=lambda: in_a_tuple,
        more={**SELDOM, "remove_unused_columns": False},
    ),
    "no loss keywords": Case(unkeyed, more=SELDOM),
    "no loss keywords, accumulated": Case(
        unkeyed, num_accumulated=2, more={**SELDOM, "logging_steps": 3}
    ),
    "accumulated": Case(
        partial(bert, "BertForSequenceClassification", 3),
        num_accumulated=2,
        data=Classified,
        more={**SELDOM, "logging_steps": 3},
    ),
}


@dataclass
class Result:
    """What came of a training."""

    parameters: torch.Tensor
    losses: list[float]
    rates: list[float]
    sizes: list[tuple[int, ...]]
    tokens: int
    train_loss: float
    gathered: list[Any]


def make(folder: str, case: Case, *, balancing: dict[str, Any] | None, **more: Any) -> Any:
    """Return a trainer of two epochs; a plain one of this process' batch without balancing."""
    from transformers import Trainer, TrainingArguments

    given = {
        "per_device_train_batch_size": case.batch_size,
        "gradient_accumulation_steps": case.num_accumulated,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "logging_steps": 1,
        **case.more,
        **more,
    }
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        data_seed=7,
        **given,
    )
    data = case.data(case.num_samples, masked=case.masked)
    parts = {"model": case.model(), "args": arguments, "train_dataset": data}
    if case.collator is not None:
        parts["data_collator"] = case.collator()
    own = dict(case.before)
    if case.loss is not None:
        own["compute_loss"] = case.loss
    own["gathered"] = []  # by a loss that gathers
    if balancing is None:
        return type("OwnTrainer", (Trainer,), own)(**parts)
    OwnTrainer = type("OwnTrainer", (Trainer,), case.behind) if case.behind else Trainer
    BalancedTrainer = type("BalancedTrainer", (BalancedMixin, OwnTrainer), own)

    return BalancedTrainer(**parts, balancing={"runtime": QUIET, **balancing})


def switched_off(rank: int, folder: str) -> tuple[Result, Result, tuple[int, ...]]:
    """Return what comes of a plain `Trainer`, of a balanced one that is switched off, and sizes."""
    offline(folder)
    plain = run(make(folder, Case(), balancing=None))
    os.environ["EVENSTEP"] = "off"
    trainer = make(folder, Case(), balancing={"policy": Restless()})
    return plain, run(trainer), trainer.balancer.batch_sizes


def run(trainer: Any, **how: Any) -> Result:
    """Train, and return what came of it."""
    from transformers import TrainerCallback

    sizes = []

    class Watch(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if isinstance(trainer, BalancedMixin):
                sizes.append(trainer.balancer.batch_sizes)

    trainer.add_callback(Watch())
    ended = trainer.train(**how)
    steps = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    return Result(
        flat(trainer.model),
        [entry["loss"] for entry in steps],
        [entry["learning_rate"] for entry in steps],
        sizes,
        trainer.state.num_input_tokens_seen,
        ended.training_loss,
        trainer.gathered[-trainer.state.global_step :],
    )


def on_the_cluster(rank: int, folder: str, names: Sequence[str]) -> dict[str, Result]:
    """Return every case as the ranks train it, under plans that change at every step."""
    offline(folder)
    return {
        name: run(make(folder, case, balancing={"policy": Restless()}))
        for name, case in ((name, CASES[name]) for name in names)
    }


def alone(rank: int, folder: str, names: Sequence[str]) -> dict[str, Result]:
    """Return every case as plain Trainer in one process makes it, with batches of all ranks."""
    offline(folder)
    return {
        name: run(
            make(
                folder,
                case,
                balancing=None,
                per_device_train_batch_size=case.batch_size * WORLD_SIZE,
            )
        )
        for name, case in ((name, CASES[name]) for name in names)
    }


def stock_on_the_cluster(rank: int, folder: str, names: Sequence[str]) -> dict[str, Result]:
    """Return every stock case as the ranks train it."""
    offline(folder)
    torch.set_default_dtype(torch.float64)  # Trainer adds up losses in the default
    return {
        name: run(make(folder, case, balancing={"policy": Restless()}))
        for name, case in ((name, STOCK[name]) for name in names)
    }


def stock_alone(rank: int, folder: str, names: Sequence[str]) -> dict[str, Result]:
    """Return the same of plain Trainer in one process, with the whole global batch at once."""
    offline(folder)
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, case in ((name, STOCK[name]) for name in names):
        size = case.batch_size * WORLD_SIZE * case.num_accumulated
        whole = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 1}
        found[name] = run(make(folder, case, balancing=None, **whole))
    return found


def resumed(rank: int, folder: str) -> dict[str, Result]:
    """Return a training of 10 steps, one that stops after 7, and what goes on from there."""
    offline(folder)
    case = Case(partial(gpt_in_double, 0.1), num_accumulated=2)
    balancing = {"policy": Restless(), "runtime": Runtime(line_every=None, sample_seed=1)}
    saves = {"save_strategy": "steps", "save_steps": 7}
    found = {"unbroken": run(make(folder, case, balancing=balancing))}
    first = make(folder, case, balancing=balancing, **saves)
    first.add_callback(_stops_after(7))
    found["first"] = run(first)
    again = make(folder, case, balancing=balancing, **saves)
    found["resumed"] = run(again, resume_from_checkpoint=f"{folder}/checkpoint-7")
    found["epoch anew"] = run(
        make(folder, case, balancing=balancing, ignore_data_skip=True, **saves),
        resume_from_checkpoint=f"{folder}/checkpoint-7",
    )
    return found


def resumed_by_length(rank: int, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return parameters of an unbroken training and of one that goes on within its first epoch.

    The order is drawn from torch's own generator.
    """
    offline(folder)
    case = Case(more={"train_sampling_strategy": "group_by_length", "num_train_epochs": 1})
    saves = {"save_strategy": "steps", "save_steps": 3}
    whole = run(make(folder, case, balancing={"policy": Restless()}))
    first = make(folder, case, balancing={"policy": Restless()}, **saves)
    first.add_callback(_stops_after(3))
    run(first)
    again = make(folder, case, balancing={"policy": Restless()}, **saves)
    goes_on = run(again, resume_from_checkpoint=f"{folder}/checkpoint-3")
    return whole.parameters, goes_on.parameters


def _stops_after(num_steps: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= num_steps

    return Stop()


def counted(rank: int, folder: str) -> tuple[int, list[int], list[int]]:
    """Return the tokens and the rows that a loss counts in training, and those of the data.

    Ranks make unlike numbers of forwards, with an evaluation after each epoch.
    """
    offline(folder)
    case = Case(batch_size=1, num_accumulated=4, num_samples=26, loss=counting_loss)
    trainer = make(folder, case, balancing={"policy": Restless()})
    trainer.eval_dataset = Sentences(5)
    trainer.args.set_evaluate(strategy="epoch", batch_size=3, delay=0)
    trainer.train()
    rows = (trainer.train_dataset.labels != -100).sum(1).tolist()
    return trainer.num_tokens, sorted(trainer.gathered), sorted(2 * rows)


SINGLE = Case(gpt, num_accumulated=2, num_samples=60)


def in_single(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """Return parameters in single precision: balanced, and of a plain Trainer with as many."""
    offline(folder)
    return {
        "balanced": run(make(folder, SINGLE, balancing={"policy": Restless()})).parameters,
        "plain": run(make(folder, SINGLE, balancing=None)).parameters,
    }


def in_single_alone(rank: int, folder: str) -> torch.Tensor:
    """Return the same of one process."""
    offline(folder)
    size = SINGLE.batch_size * WORLD_SIZE
    return run(make(folder, SINGLE, balancing=None, per_device_train_batch_size=size)).parameters


def beside(rank: int, folder: str) -> dict[str, Any]:
    """Return what evaluation, and a loader asked for beside training, give."""
    from transformers import TrainerCallback

    offline(folder)
    looked = []

    class Look(TrainerCallback):
        def on_train_begin(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
            looked.append(len(next(iter(train_dataloader))["labels"]))

        def on_epoch_end(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
            both = train_dataloader, trainer.get_train_dataloader()
            looked.extend(sum(len(batch["labels"]) for batch in loader) for loader in both)

    trainer = make(folder, Case(num_samples=12), balancing={"policy": Equal()})
    trainer.eval_dataset = Sentences(20)
    trainer.args.set_evaluate(strategy="epoch", batch_size=3, delay=0)
    outside = trainer.get_train_dataloader()
    kept = trainer.balancer
    trainer.add_callback(Look())
    run(trainer)
    looked_at = list(looked)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    again = run(trainer)  # a second training with the same trainer: from where the first ended
    return {
        "outside": type(outside).__name__,
        "balancer before": kept,
        "evaluations": losses,
        "again": len(again.losses),
        "looked at": looked_at,
    }
