"""Batches of any size for a profile, of samples that training will see as if for the first time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ...exceptions import invalid
from .._data.fetch._torch_loader import pinner, pinning


def first_samples(loader: Any, count: int) -> list[Any]:
    """Return up to ``count`` samples from the beginning of the loader's data set, uncollated.

    Fetched as in training: by a worker process, set up as the user's are, where there are any.
    The sampler is not asked, and no generator that training draws from is drawn from.

    Args:
        loader: the user's own, or what ``prepare`` made of it.
        count: how many, at least 1.

    Raises:
        ValueError: the data set is a stream, which cannot be read without using it up.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise invalid(
            "Balancer.profile(samples=...)",
            "be given for a stream, as what was read of it is gone for training",
            "None",
            "Give a list of samples as the stream yields them; they are repeated as needed.",
        )
    count = min(count, len(dataset))
    stock = DataLoader(
        dataset,
        batch_size=count,
        sampler=range(count),
        num_workers=min(loader.num_workers, 1),
        collate_fn=_as_they_are,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    (samples,) = stock
    return list(samples)


def batch_maker(loader: Any, samples: Sequence[Any]) -> Callable[[int], Any]:
    """Return what makes a batch of so many samples, as the loader's ``collate_fn`` lays them.

    Args:
        loader: as for ``first_samples``.
        samples: taken in turn, over and over. Each time a copy, as a ``collate_fn`` may change
            what it is given.
    """
    batch_of = pinning(loader.collate_fn, pinner(wanted=loader.pin_memory))

    def make(size: int) -> Any:
        taken = [copy.deepcopy(samples[index % len(samples)]) for index in range(size)]
        return batch_of(taken)

    return make


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples
