"""Lightning itself: its class of callbacks, and what of it has no public name (2.6)."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

from .._install import install_line


def callback_base() -> Any:
    """Return the class that callbacks derive from; Lightning's command lines take no other.

    Raises:
        ImportError: Lightning is not installed.
    """
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", "lightning.pytorch", "pytorch_lightning"):
                raise
    raise ImportError(f"`evenstep.lightning` needs Lightning: `{install_line('lightning')}`.")


def hook_of(module: Any) -> str | None:
    """Return the hook of ``module`` that is under way, such as ``"training_step"``."""
    hook: str | None = module._current_fx_name
    return hook


def takes_loader(step: Any) -> bool:
    """Return whether ``step`` of a module is given the loader's iterator, and not a batch."""
    return "dataloader_iter" in signature(step).parameters


def weigh_batch(trainer: Any, num_samples: int) -> None:
    """Have what is logged of the batch in hand count ``num_samples`` in the mean of an epoch."""
    trainer._results.batch_size = num_samples


def take_up_position(trainer: Any) -> None:
    """Give loaders their states from a checkpoint that is being resumed, unless that was done."""
    trainer.fit_loop._load_combined_loader_states()
