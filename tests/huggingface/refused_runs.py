"""Trainers that are set up for what is not balanced, and what they are refused with."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

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
        ("own step", Case(behind={"training_step": own_step}), {}, {}),
        ("own step before", Case(before={"training_step": own_step}), {}, {}),
        ("own loader before", Case(before={"get_train_dataloader": own_loader}), {}, {}),
    ):
        try:
            run(make(folder, case, balancing=balancing, **more))
        except ValueError as error:
            found[name] = str(error)
    return found
