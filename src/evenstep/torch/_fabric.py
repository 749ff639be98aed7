"""Wrappers of Lightning Fabric and Ray Train around models and loaders, known by their attributes.

Nothing is imported from either. A model is balanced inside of its wrapper, which stays the
user's. A loader is balanced instead of the one in its wrapper, and does what the wrapper did.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.utils.data import BatchSampler

from .._nested_tensors import rebuild
from ..exceptions import invalid
from ._data._step import Step

Loader = TypeVar("Loader")


def wrapped_model(module: nn.Module) -> nn.Module:
    """Return the model that Fabric's wrapper calls; ``module`` itself if it is no such wrapper."""
    inner = dict(module.named_children()).get("_forward_module")
    return module if inner is None else inner


def still_wrapped(given: nn.Module, prepared: nn.Module) -> nn.Module:
    """Return what the user gets back: the wrapper that was given, or the prepared model.

    Args:
        given: by the user.
        prepared: the model, in a DDP of its own perhaps.

    Raises:
        ValueError: the wrapper would continue to call the model without that DDP.
    """
    inner = wrapped_model(given)
    if inner is given:
        return prepared
    if inner is not prepared:
        raise invalid(
            "Balancer.prepare(model)",
            "average gradients over the balanced ranks",
            "a model from `Fabric.setup` that is in no DDP",
            'Use `Fabric(strategy="ddp", devices=...)` with as many processes, or prepare the '
            "model without `Fabric.setup`.",
        )
    return given


def wrapped_loader(loader: Any) -> Any:
    """Return the ``DataLoader`` in a wrapper, in one order of the whole data set.

    Fabric puts a ``DistributedSampler`` of its own kind around a user's sampler; the user's own
    is taken out again. Ray's is torch's, which every loader may have. ``loader`` itself if it is
    no such wrapper.
    """
    inner = getattr(loader, "_dataloader", None)
    if inner is not None and _is_rays(loader):
        return inner
    if inner is None or not hasattr(loader, "_num_iter_calls"):
        return loader
    return with_own_sampler(inner)


def with_own_sampler(loader: Any) -> Any:
    """Return a ``DataLoader`` with the user's sampler where Lightning put its own around that."""
    users = getattr(getattr(loader.sampler, "dataset", None), "_sampler", None)
    if users is None or loader.batch_size is None:
        return loader
    alone = copy.copy(loader)
    # Past the guard of `DataLoader`, which keeps these from being set once it is made.
    alone.__dict__["sampler"] = users
    alone.__dict__["batch_sampler"] = BatchSampler(users, loader.batch_size, loader.drop_last)
    return alone


def unwrapped(part: Any) -> Any:
    """Return the model or the loader in Fabric's wrapper; ``part`` itself if it is neither."""
    return wrapped_model(part) if isinstance(part, nn.Module) else wrapped_loader(part)


def as_wrapped(given: Any, prepared: Loader) -> Loader | FabricLoader:
    """Return the prepared loader, doing what the wrapper did if one was given."""
    if wrapped_loader(given) is given:
        return prepared
    if not _is_rays(given):
        return FabricLoader(prepared, given._device)
    # Ray leaves it to the script to set the sampler's epoch.
    return FabricLoader(prepared, given.device, counts_epochs=False)


def _is_rays(loader: Any) -> bool:
    """Return whether a wrapper is Ray Train's: a ``DataLoader`` by class, around the real one."""
    return hasattr(loader, "_auto_transfer")


@final
class FabricLoader:
    """A prepared loader that does what Fabric's does: moves batches, and counts epochs.

    Every loop sets its number on the sampler, from 0, so that each epoch has an order of its own.
    All else is the prepared loader's: ``steps``, ``num_samples``, ``add``, ``mean``, ``close``.

    Args:
        loader: for training or for evaluation.
        device: where batches go; None leaves them where they are.
        counts_epochs: whether loops set their number on the sampler. Ray Train's do not.
    """

    def __init__(
        self, loader: Any, device: torch.device | None, *, counts_epochs: bool = True
    ) -> None:
        self._loader = loader
        self._device = device
        self._counts_epochs = counts_epochs
        self._num_loops = 0

    def __getattr__(self, name: str) -> Any:
        """Return what the prepared loader has under ``name``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the prepared loader, which refuses those that were fixed."""
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        """Return the length of the prepared loader."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        with closing(iter(self._loader)) as batches:
            for batch in batches:
                yield self._moved(batch)

    def steps(self) -> Iterator[FabricStep]:
        """Return an iterator over the epoch's steps, each to be iterated for its micro-batches."""
        self._begin()
        with closing(self._loader.steps()) as steps:
            for step in steps:
                yield FabricStep(step, self._moved)

    def set_epoch(self, epoch: int) -> None:
        """Have the next loop be that of ``epoch``, and count on from there."""
        self._num_loops = epoch
        if not self._counts_epochs:
            self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands, as the prepared loader does, and the number of the loop.

        A loop that was left early continues under its own number.
        """
        state = self._loader.state_dict()
        unfinished = state["steps_taken"] > 0 and not self._is_over(state)
        return {**state, "num_loops": self._num_loops - unfinished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next loop continue from ``state``, on every rank.

        Raises:
            ValueError: as for the prepared loader.
        """
        self._loader.load_state_dict(state)
        self._num_loops = state.get("num_loops", 0)

    def _begin(self) -> None:
        if self._counts_epochs:
            self._loader.set_epoch(self._num_loops)
        self._num_loops += 1

    def _is_over(self, state: dict[str, Any]) -> bool:
        """Return whether the epoch is over; a stream says so itself, and has no length."""
        over = state["finished"] if "finished" in state else state["steps_taken"] == len(self)
        return bool(over)

    def _moved(self, batch: Any) -> Any:
        return batch if self._device is None else moved(batch, self._device)


@final
class FabricStep:
    """A step whose micro-batches are moved before they are handed out.

    Args:
        step: the balancer's.
        move: from a batch to the batch in its place.
    """

    def __init__(self, step: Step, move: Callable[[Any], Any]) -> None:
        self._step = step
        self._move = move

    def __getattr__(self, name: str) -> Any:
        """Return what the balancer's step has under ``name``, such as ``num_samples``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._step, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._step:
            yield self._move(batch)

    def backward(self, closure: Callable[[Any], torch.Tensor], **options: Any) -> torch.Tensor:
        """Run as ``Step.backward`` does, on batches that were moved."""
        return self._step.backward(lambda batch: closure(self._move(batch)), **options)


def moved(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with all that can be moved on ``device``, tensors and what has a ``to``."""

    def visit(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, non_blocking=device.type == "cuda")
        return item.to(device) if hasattr(item, "to") else rebuild(item, visit)

    return visit(batch)
