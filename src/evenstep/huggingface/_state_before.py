"""What a trainer keeps beside its model, as it was before a loss that is not of its training."""

from __future__ import annotations

from collections import deque
from typing import Any, final

import torch
from torch import nn
from torch.utils.data import Dataset

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


@final
class StateBefore:
    """The attributes of a trainer, and what is in its containers and in objects of the script's.

    Such as the metrics and the number of tokens of TRL's trainers, which their losses add to.

    Args:
        trainer: whose state is kept.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._attributes = dict(vars(trainer))
        self._parts: dict[int, tuple[Any, Any]] = {}
        for kind in type(trainer).__mro__:
            if not _is_of_a_library(kind):
                self._walk([value for name, value in vars(kind).items() if name[:2] != "__"])
        self._walk([value for name, value in vars(trainer).items() if name not in _NOT_WALKED])

    def restore(self) -> None:
        """Have all of it be as it was."""
        now = vars(self._trainer)
        now.clear()
        now.update(self._attributes)
        for value, before in self._parts.values():
            if isinstance(value, torch.Tensor):
                value.copy_(before)
                continue
            value.clear()
            value.extend(before) if isinstance(value, list | deque) else value.update(before)

    def _walk(self, values: list[Any]) -> None:
        while values and len(self._parts) < _MOST:
            value = values.pop()
            if id(value) in self._parts or isinstance(value, nn.Module | Dataset | type):
                continue
            if isinstance(value, torch.Tensor):
                if value.numel() <= _LARGEST and not value.requires_grad:
                    self._parts[id(value)] = value, value.clone()
            elif isinstance(value, dict):
                self._parts[id(value)] = value, dict(value)
                values += value.values()
            elif isinstance(value, list | deque | set):
                self._parts[id(value)] = value, list(value)
                values += value
            elif hasattr(value, "__dict__") and not _is_of_a_library(type(value)):
                values.append(vars(value))


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _OF_LIBRARIES
