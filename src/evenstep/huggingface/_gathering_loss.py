"""A loss in which ranks wait for each other, as where it gathers metrics: as many forwards on all.

What a trainer keeps beside its model is as before, after a loss that is not of its training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from .._private_torch import CollectiveCount, meet

_OF_LIBRARIES = (
    "accelerate",
    "builtins",
    "datasets",
    "evenstep",
    "numpy",
    "peft",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
    "vllm",
)
_NOT_WALKED = ("train_dataset", "eval_dataset", "data_collator", "processing_class")
_LARGEST = 4096  # elements of a tensor that is taken for a metric
_MOST = 100_000  # containers: more are data


@contextmanager
def _as_before(trainer: Any) -> Iterator[None]:
    """Have a trainer's attributes be as before, and what is in its and the script's containers.

    Such as the metrics and the number of tokens of TRL's trainers, which their losses add to.
    """
    attributes = dict(vars(trainer))
    values = [value for name, value in attributes.items() if name not in _NOT_WALKED]
    for kind in type(trainer).__mro__:
        if not _is_of_a_library(kind):
            values += [value for name, value in vars(kind).items() if name[:2] != "__"]
    parts = _parts_of(values)
    try:
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(attributes)
        for value, before in parts:
            if isinstance(value, torch.Tensor):
                value.copy_(before)
                continue
            value.clear()
            value.extend(before) if isinstance(value, list | deque) else value.update(before)


def _parts_of(values: list[Any]) -> list[tuple[Any, Any]]:
    """Return the small tensors and the containers that values lead to, each with a copy."""
    parts: dict[int, tuple[Any, Any]] = {}
    while values and len(parts) < _MOST:
        value = values.pop()
        if id(value) in parts or isinstance(value, nn.Module | Dataset | type):
            continue
        if isinstance(value, torch.Tensor):
            if value.numel() <= _LARGEST and not value.requires_grad:
                parts[id(value)] = value, value.clone()
        elif isinstance(value, dict):
            parts[id(value)] = value, dict(value)
            values += value.values()
        elif isinstance(value, list | deque | set):
            parts[id(value)] = value, list(value)
            values += value
        elif hasattr(value, "__dict__") and not _is_of_a_library(type(value)):
            values.append(vars(value))
    return list(parts.values())


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OF_LIBRARIES


def loss_alone(trainer: Any, batch: Any, num_items: Any) -> float:
    """Return the loss, with the same random numbers in every call; nothing counts it."""
    with _as_before(trainer):
        return float(without_gradient(trainer, batch, num_items))


def without_gradient(trainer: Any, batch: Any, num_items: Any) -> Any:
    """Return the loss of a batch on the model beneath DDP, and leave random states as they are.

    To the trainer it is a forward in training, whatever came before it, such as an evaluation.
    """
    model, device = trainer.accelerator.unwrap_model(trainer.model_wrapped), trainer.args.device
    with (
        _as_in_training(model, trainer.model, trainer.model_wrapped),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
        trainer.compute_loss_context_manager(),
    ):
        torch.manual_seed(0)  # what is drawn in evaluation mode too is drawn alike
        inputs = trainer._prepare_inputs(copy(batch))
        return trainer.compute_loss(model, inputs, num_items_in_batch=num_items)


@contextmanager
def _as_in_training(*models: nn.Module) -> Iterator[None]:
    """Have models say that they train, while their layers neither drop out nor take statistics."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.eval()
        for model in models:
            model.training = True
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def meets(trainer: Any, batch: Any, num_items: Any) -> bool:
    """Return whether ranks meet where the loss is computed. Collective: every rank computes one."""
    if trainer.accelerator.num_processes == 1:
        return False
    meet_before_forwards(trainer)  # which is none of the loss
    count = CollectiveCount()
    before = count()
    loss_alone(trainer, batch, num_items)
    return count() != before


def num_missing(trainer: Any, num_forwards: int) -> int:
    """Return how many forwards this rank has less than the one with the most. Collective."""
    mine = torch.tensor([num_forwards], device=trainer.args.device)
    counts: list[int] = trainer.accelerator.gather(mine).tolist()
    return max(counts) - num_forwards


def meet_before_forwards(trainer: Any, *, equal_forwards: bool = False) -> None:
    """Have ranks meet now in what DDP, or FSDP2, does at the begin of a forward. Collective.

    Ranks differ in which of a step's portions their first forward is. Between portions `Trainer`
    may gather the number of tokens, and callbacks what they like.

    Args:
        trainer: whose model it is.
        equal_forwards: whether ranks do not, so that FSDP2 gathers in each forward.
    """
    if isinstance(trainer.model_wrapped, DistributedDataParallel):
        meet(trainer.model_wrapped)
    for model in trainer.balancer._parts.models:
        if model.shards is not None and not equal_forwards:
            model.shards.gather(ahead=True)
