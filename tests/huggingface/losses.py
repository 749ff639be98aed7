"""Losses of a trainer's own, in the place of its `compute_loss`."""

from __future__ import annotations

from typing import Any

import torch


def own_loss(trainer: Any, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
    """Return the loss of the model as many scripts do, without the number of items."""
    return model(**inputs)["loss"]


def loss_of_a_tuple(trainer: Any, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
    """Return the loss of the model on a batch that is no mapping."""
    ids, labels = inputs
    return model(input_ids=ids, labels=labels)["loss"]


def summed_loss(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any, **_: Any) -> Any:
    """Return squared distances over the number of items, of which all numbers are some."""
    off = model(input_ids=inputs["input_ids"])["logits"].squeeze(-1) - inputs["labels"]
    return off.square().sum() / num_items_in_batch * trainer.accelerator.num_processes


def gathering_loss(
    trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return Trainer's own loss, with a metric gathered in every forward, as TRL's trainers do."""
    from transformers import Trainer

    targets = (inputs["labels"] != -100).sum()
    trainer.gathered.append(int(trainer.accelerator.gather_for_metrics(targets).sum()))
    return Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=num_items_in_batch)


def counting_loss(
    trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, **options: Any
) -> Any:
    """Return Trainer's own loss; in training count the tokens of all ranks, as TRL's SFT does."""
    from transformers import Trainer

    if trainer.model.training:
        tokens = trainer.accelerator.gather_for_metrics(torch.tensor(inputs["labels"].numel()))
        targets = trainer.accelerator.gather_for_metrics((inputs["labels"] != -100).sum(1))
        trainer.num_tokens = getattr(trainer, "num_tokens", 0) + int(tokens.sum())
        trainer.gathered += targets.tolist()
    return Trainer.compute_loss(
        trainer, model, inputs, num_items_in_batch=num_items_in_batch, **options
    )


def row_gathering_loss(
    trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return Trainer's own loss, with two metrics of every row gathered, as TRL does."""
    from transformers import Trainer

    first, last = inputs["labels"][:, 0], inputs["labels"][:, 1:].sum(1)
    gathered = trainer.accelerator.gather({"first": first, "last": last})
    rows = zip(gathered["first"].tolist(), gathered["last"].tolist(), strict=True)
    trainer.gathered.append(sorted(rows))
    return Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=num_items_in_batch)
