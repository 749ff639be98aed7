"""Torch's own loader, piece by piece: how it fetches, seeds, pins, and runs its workers."""

from __future__ import annotations

import copy
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from operator import getitem
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ...._private_torch import pinned
from ...._warning import warn

Answer = TypeVar("Answer")
_WORKER_S = 30.0  # within which a loader worker has to start and answer a question


@contextmanager
def same_chance() -> Iterator[None]:
    """Keep the random states of torch, numpy and Python as they are, whatever is drawn inside."""
    python, own = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy.random")
    legacy = None if numpy is None else numpy.get_state()
    on_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(own)
        if numpy is not None:
            numpy.set_state(legacy)
        if on_cuda is not None:
            torch.cuda.set_rng_state(on_cuda)


def seed_all(seed: int) -> None:
    """Seed what data sets draw from, alike on all ranks; no device is initialised."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        with suppress(TypeError, RuntimeError):  # of a bit generator of the script's own
            numpy.seed(seed % (1 << 32))


Wanted = list[int] | list[list[int]]
"""Indices of samples; or pairs of an index and the seed of what that sample draws."""


def fetch(dataset: Any, wanted: Wanted) -> list[Any]:
    """Return samples: by index in one go if the data set knows how to, by seed one by one."""
    if wanted and isinstance(wanted[0], list):
        return _fetch_seeded(dataset, wanted)
    indices: Any = wanted
    if not getattr(dataset, "__getitems__", None):
        return list(map(getitem, repeat(dataset), indices))
    samples = list(dataset.__getitems__(indices))
    if len(samples) != len(indices):
        raise ValueError(
            f"`__getitems__` must return {len(indices)} samples for as many indices, "
            f"got {len(samples)}. Return one per index, in their order."
        )
    return samples


def _fetch_seeded(dataset: Any, pairs: Any) -> list[Any]:
    """Return samples that draw from seeds of their own, and leave the random states alone."""
    samples = []
    with same_chance():
        for index, seed in pairs:
            seed_all(seed)
            samples += fetch(dataset, [index])
    return samples


def inner_loader(
    loader: DataLoader[Any], dataset: Any, generator: torch.Generator, **settings: Any
) -> DataLoader[Any]:
    """Return a loader of torch's over ``dataset``, with workers as the user's are set up.

    Args:
        loader: the user's own.
        dataset: what is loaded in place of its data set, which is its ``dataset``.
        generator: draws what seeds the workers.
        settings: of the new ``DataLoader``, where it is not to yield items as they are.
    """
    settings = {
        "num_workers": loader.num_workers,
        "multiprocessing_context": loader.multiprocessing_context,
        "worker_init_fn": partial(_set_up, loader.worker_init_fn, gc.isenabled()),
        "batch_size": None,
        "collate_fn": _as_it_is,
    } | settings
    with warnings.catch_warnings():
        # The user's own loader has said so already.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        return _InnerLoader(dataset, generator=generator, **settings)


class _InnerLoader(DataLoader[Any]):
    """A loader whose forked workers collect nothing before ``_set_up`` freezes what they share."""

    def __iter__(self) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return super().__iter__()
        finally:
            if collects:
                gc.enable()


def asked(loader: DataLoader[Any], question: Callable[[], Answer]) -> Answer:
    """Return what ``question`` finds, with the random states left as they were.

    In a loader worker of its own where the loader has workers, set up as theirs, and never in this
    process then.
    """
    if loader.num_workers == 0:
        with same_chance():
            return question()
    timeout = max(_WORKER_S, loader.timeout)
    probe = _Probe(loader.dataset, question)
    (answer,) = inner_loader(loader, probe, torch.Generator(), num_workers=1, timeout=timeout)
    return answer  # type: ignore[no-any-return]


class _Probe(Dataset[Any]):
    """A data set of one item: what a question finds in a loader worker."""

    def __init__(self, dataset: Any, question: Callable[[], Any]) -> None:
        self.dataset = dataset
        self._question = question

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self._question()


def _as_it_is(item: Any) -> Any:
    return item


def _set_up(function: Callable[[int], Any] | None, collects: bool, worker: int) -> None:
    """Show the user's code the user's data set, then run the user's ``worker_init_fn``."""
    # What was garbage when this process was forked is its parent's to collect. A process group
    # would wait here, in its destructor, for a thread that the parent alone has: for ever.
    gc.freeze()
    if collects:
        gc.enable()
    info = get_worker_info()
    assert info is not None
    service: Any = info.dataset
    # Past the frozen guard: `get_worker_info().dataset` is where such functions look.
    object.__setattr__(info, "dataset", service.dataset)
    if function is not None:
        function(worker)


def with_parts(loader: DataLoader[Any], **parts: Any) -> DataLoader[Any]:
    """Return a copy with other parts, past the guard that keeps them as they were made."""
    made = copy.copy(loader)
    made.__dict__.update(parts, _iterator=None)
    return made


def worker_generator(loader: DataLoader[Any]) -> torch.Generator:
    """Return a generator that draws the seed of the workers, and draw it from the loader's own.

    Where and when torch's loader does: given the same generators, the workers have the same seeds
    and a single process sees the same order.
    """
    source = torch.default_generator if loader.generator is None else loader.generator
    copy = torch.Generator()
    copy.set_state(source.get_state())
    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=source)
    return copy


def pinning(
    loader: DataLoader[Any], collate: Callable[[Any], Any], *, warns: bool = True
) -> Callable[[Any], Any]:
    """Return ``collate``, whose batches are moved into pinned memory if the loader asks for that.

    For the thread that calls it: it takes over the device of this one. Without an accelerator
    nothing can come of it, which it ``warns`` of.
    """
    if not loader.pin_memory:
        return collate
    is_there = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if is_there else None
    if device is None:
        if warns:
            text = "`DataLoader(pin_memory=True)` has no effect: there is no accelerator."
            warn(text, UserWarning)
        return collate
    index = torch.accelerator.current_device_index()

    def pinned_batch(samples: Any) -> Any:
        torch.accelerator.set_device_index(index)
        return pinned(collate(samples), device.type)

    return pinned_batch
