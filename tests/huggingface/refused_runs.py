"""Trainers that are set up for what is not balanced, and what they are refused with."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from evenstep.torch import Runtime

from .small import Pairs, Sentences, TwoTexts, offline, two_texts
from .trainer_runs import Case, make, run


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
