"""What is put in the place of functions of torch, so that a watch hears of them.

Classes are changed, and no object of the user's: none gets a hook, and whatever is copied or
pickled is as it would be. What is put there calls what was there, and returns what it returns. In
a compiler it is nothing else, so that graphs and their breaks stay the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from .._diagnosis import Phase
from .._private_torch import (
    EVAL_FRAME,
    SYNC_BUFFERS,
    loader_iterators,
    original_of,
)
from ._call_sites import frames_from
from ._step_log import StepLog
from ._watch import Watch

Current = Callable[[], Watch | None]
"""Returns the watch on this process; None while there is none, and inside of a compiler."""

Hearing = Callable[[], StepLog | None]
"""Returns what hears of this thread; None where nothing does, and inside of a compiler."""


class WhenLoaded(Protocol):
    """Has a call made when a module is loaded, or now if it is."""

    def __call__(self, name: str, call: Callable[[Any], None]) -> None:
        """Have ``call(module)`` called."""


@final
class Patches:
    """Puts functions of ours in the place of others.

    Args:
        current: returns the watch on this process.
        hearing: returns what hears of this thread.
        when_loaded: has a call made when a module is loaded.
    """

    def __init__(self, current: Current, hearing: Hearing, when_loaded: WhenLoaded) -> None:
        self.current, self.hearing, self.when_loaded = current, hearing, when_loaded

    def put(self, owner: Any, name: str, make: Callable[[Any, Hearing], Any]) -> None:
        """Put ``make(before, hearing)`` in the place of what ``owner`` calls ``name``."""
        before = getattr(owner, name)
        setattr(owner, name, wraps(before)(make(before, self.hearing)))

    def put_maker(self, owner: Any, name: str, make: Callable[[Any, Current], Any]) -> None:
        """Put ``make(before, current)`` there, of what makes a model."""
        before = getattr(owner, name)
        setattr(owner, name, wraps(before)(make(before, self.current)))


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes, by its first parameter."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def patch_ddp(patches: Patches) -> None:
    """Have the forwards of ``DistributedDataParallel`` heard of, and the waits in them."""

    def made(before: Any, current: Current) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            before(self, *args, **kwargs)
            if (watch := current()) is not None:
                name = "DistributedDataParallel"
                watch.model_made("DDP", name, device_of(self), frames_from(1))

        return __init__

    patches.put_maker(DistributedDataParallel, "__init__", made)
    patches.put(DistributedDataParallel, "forward", watched_forward)
    patches.put(DistributedDataParallel, SYNC_BUFFERS, meeting)


def watched_forward(before: Any, hearing: Hearing) -> Any:
    """Return a forward that is heard of."""

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if (log := hearing()) is None:
            return before(self, *inputs, **kwargs)
        log.guard(log.forward_begins, self, (inputs, kwargs) if kwargs else inputs)
        output = before(self, *inputs, **kwargs)
        log.guard(log.forward_ends, output)
        return output

    return forward


def patch_compiled(patches: Patches) -> None:
    """Have the forwards of a DDP heard of that is compiled as a whole.

    DDP's own forward is in the graph then, where nothing of ours may be.
    """

    def called(before: Any, hearing: Hearing) -> Any:
        heard = watched_forward(before, hearing)

        def __call__(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            is_ddp = isinstance(original_of(self), DistributedDataParallel)
            return (heard if is_ddp else before)(self, *inputs, **kwargs)

        return __call__

    patches.when_loaded(
        EVAL_FRAME, lambda module: patches.put(module.OptimizedModule, "__call__", called)
    )


def meeting(before: Any, hearing: Hearing) -> Any:
    """Return a method in which others are waited for."""

    def met(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (log := hearing()) is None or log.meets:
            return before(self, *args, **kwargs)
        log.meets, begin = True, log.clock.mark()
        try:
            return before(self, *args, **kwargs)
        finally:
            log.guard(log.met, begin)

    return met


def patch_collectives(patches: Patches) -> None:
    """Have the waits in the script's own collectives heard of, such as a barrier.

    All of them wait for their work in Python; DDP waits for its own in C++.
    """
    patches.put(dist.Work, "wait", meeting)


def patch_loaders(patches: Patches) -> None:
    """Have it heard of when a loader is opened, and when it is asked for a batch.

    A loader of Accelerate's that reads on rank 0 for all ranks hands out on each of them, so that
    all have the same steps.
    """

    def opened(before: Any, hearing: Hearing) -> Any:
        def __iter__(self: Any) -> Any:
            if (log := hearing()) is None:
                return before(self)
            log.guard(log.input_begins)
            try:
                return before(self)
            finally:
                log.guard(log.input_ends, False)

        return __iter__

    def read(before: Any, hearing: Hearing) -> Any:
        def __next__(self: Any) -> Any:
            if (log := hearing()) is None:
                return before(self)
            log.guard(log.input_begins)
            is_there = False
            try:
                batch = before(self)
                is_there = True
                return batch
            finally:
                log.guard(log.input_ends, is_there)
                is_first = log.num_stepped < 2 and is_there and not log.evaluates
                if is_first and (watch := patches.current()) is not None:
                    watch.loader_read(self)

        return __next__

    patches.put(DataLoader, "__iter__", opened)
    patches.put(loader_iterators(), "__next__", read)
    patches.when_loaded(
        "accelerate.data_loader",
        lambda module: patches.put(module.DataLoaderDispatcher, "__iter__", _dispatched),
    )


def _dispatched(before: Any, hearing: Hearing) -> Any:
    """Return a generator that hands out batches, wherever they were read."""

    def __iter__(self: Any) -> Any:
        batches = before(self)
        while True:
            if (log := hearing()) is not None:
                log.guard(log.input_begins)
            is_there = False
            try:
                batch = next(batches)
                is_there = True
            except StopIteration:
                return
            finally:
                if log is not None:
                    log.guard(log.input_ends, is_there)
            yield batch

    return __iter__


def patch_saving(patches: Patches) -> None:
    """Have it heard of when something is saved."""

    def timed(before: Any, hearing: Hearing) -> Any:
        def saved(*args: Any, **kwargs: Any) -> Any:
            if (log := hearing()) is None:
                return before(*args, **kwargs)
            log.guard(log.enter, Phase.CHECKPOINT)
            try:
                return before(*args, **kwargs)
            finally:
                log.guard(log.leave)

        return saved

    heard_of: dict[int, Any] = {}  # by the id of what it is in the place of

    def each(*names: str) -> Callable[[Any], None]:
        def put(module: Any) -> None:
            for name in names:
                if (before := getattr(module, name, None)) is not None:
                    patches.put(module, name, timed)
                    heard_of[id(before)] = getattr(module, name)

        return put

    each("save")(torch.serialization)
    patches.when_loaded("torch.distributed.checkpoint.state_dict_saver", each("save", "async_save"))
    patches.when_loaded("safetensors.torch", each("save_file"))
    _put_wherever_imported(heard_of)


def _put_wherever_imported(heard_of: dict[int, Any]) -> None:
    """Put functions where modules have imported, by any name, what they are in the place of.

    Read past the modules' own ``__getattribute__``: one that is loaded late would load.
    """
    for module in tuple(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            names = object.__getattribute__(module, "__dict__")
            for name, value in tuple(names.items()):
                if (after := heard_of.get(id(value))) is not None:
                    names[name] = after
