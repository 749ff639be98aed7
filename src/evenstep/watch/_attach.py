"""Attach a watch to this process: what stands in for functions of torch, from its group on."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from .._diagnosis import Phase
from .._private_torch import (
    EVAL_FRAME,
    FSDP2_GATHER,
    FSDP2_GROUP,
    FSDP2_INIT,
    FSDP2_POST_FORWARD,
    FSDP2_ROOT_PRE_FORWARD,
    FSDP2_STATE,
    FSDP2_WAITS,
    SYNC_BUFFERS,
    default_store,
    fsdp2_device,
    fsdp2_is_root,
    loader_iterators,
    original_of,
)
from ._courier import ends_of
from ._recorder import StepLog
from ._start_watch import ALONE, SEEN, WatchSettings
from ._watch import Watch
from ._watched_run import MadeLoader, frames_from

Current = Callable[[], Watch | None]
"""Returns the watch on this process; None while there is none, and inside of a compiler."""

CurrentLog = Callable[[], StepLog | None]
"""Returns the log of this thread; None where nothing does, and inside of a compiler."""


class WhenLoaded(Protocol):
    """Has a call made when a module is loaded, or now if it is."""

    def __call__(self, name: str, call: Callable[[Any], None]) -> None:
        """Have ``call(module)`` called."""


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes, by its first parameter."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


@final
class Patches:
    """Puts functions of ours in the place of others.

    Args:
        current: returns the watch on this process.
        current_log: returns the log of this thread.
        when_loaded: has a call made when a module is loaded.
    """

    def __init__(self, current: Current, current_log: CurrentLog, when_loaded: WhenLoaded) -> None:
        self.current, self.current_log, self.when_loaded = current, current_log, when_loaded

    def put(self, owner: Any, name: str, make: Callable[[Any, CurrentLog], Any]) -> None:
        """Put ``make(before, current_log)`` in the place of what ``owner`` calls ``name``."""
        before = getattr(owner, name)
        setattr(owner, name, wraps(before)(make(before, self.current_log)))

    def put_maker(
        self,
        owner: Any,
        name: str,
        kind: str,
        made: str,
        device_of: Callable[[Any], torch.device] = device_of,
    ) -> None:
        """Notify the watch when a model is made, by what ``owner`` calls ``name``.

        Args:
            owner, name: the method that makes it.
            kind: how gradients are exchanged in it.
            made: what its maker is called in scripts.
            device_of: where it computes.
        """
        before, current = getattr(owner, name), self.current

        @wraps(before)
        def make(model: Any, *args: Any, **kwargs: Any) -> None:
            before(model, *args, **kwargs)
            if (watch := current()) is not None:
                watch.model_made(kind, made, device_of(model), frames_from(1))

        setattr(owner, name, make)


def patch_ddp(patches: Patches) -> None:
    """Log the forwards of ``DistributedDataParallel``, and the waits in them."""

    patches.put_maker(DistributedDataParallel, "__init__", "DDP", "DistributedDataParallel")
    patches.put(DistributedDataParallel, "forward", watched_forward)
    patches.put(DistributedDataParallel, SYNC_BUFFERS, meeting)


def watched_forward(before: Any, current_log: CurrentLog) -> Any:
    """Return a forward that is logged."""

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        if (log := current_log()) is None:
            return before(self, *inputs, **kwargs)
        log.guard(log.forward_begins, self, (inputs, kwargs) if kwargs else inputs)
        output = before(self, *inputs, **kwargs)
        log.guard(log.forward_ends, output)
        return output

    return forward


def patch_compiled(patches: Patches) -> None:
    """Log the forwards of a DDP that is compiled as a whole.

    DDP's own forward is in the graph then, where nothing of ours may be.
    """

    def called(before: Any, current_log: CurrentLog) -> Any:
        observed = watched_forward(before, current_log)

        def __call__(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            is_ddp = isinstance(original_of(self), DistributedDataParallel)
            return (observed if is_ddp else before)(self, *inputs, **kwargs)

        return __call__

    patches.when_loaded(
        EVAL_FRAME, lambda module: patches.put(module.OptimizedModule, "__call__", called)
    )


def meeting(before: Any, current_log: CurrentLog) -> Any:
    """Return a method in which others are waited for."""

    def met(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (log := current_log()) is None or log.meets:
            return before(self, *args, **kwargs)
        log.meets, begin = True, log.clock.mark()
        try:
            return before(self, *args, **kwargs)
        finally:
            log.guard(log.met, begin)

    return met


def patch_collectives(patches: Patches) -> None:
    """Log the waits in the script's own collectives, such as a barrier.

    All of them wait for their work in Python; DDP waits for its own in C++.
    """
    patches.put(dist.Work, "wait", meeting)


def patch_loaders(patches: Patches) -> None:
    """Log when a loader is opened, and when it is asked for a batch.

    A loader of Accelerate's that reads on rank 0 for all ranks hands out on each of them, so that
    all have the same steps.
    """

    def opened(before: Any, current_log: CurrentLog) -> Any:
        def __iter__(self: Any) -> Any:
            if (log := current_log()) is None:
                return before(self)
            log.guard(log.input_begins)
            try:
                return before(self)
            finally:
                log.guard(log.input_ends, False)

        return __iter__

    def read(before: Any, current_log: CurrentLog) -> Any:
        def __next__(self: Any) -> Any:
            if (log := current_log()) is None:
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


def _dispatched(before: Any, current_log: CurrentLog) -> Any:
    """Return a generator that hands out batches, wherever they were read."""

    def __iter__(self: Any) -> Any:
        batches = before(self)
        while True:
            if (log := current_log()) is not None:
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
    """Log when something is saved."""

    def timed(before: Any, current_log: CurrentLog) -> Any:
        def saved(*args: Any, **kwargs: Any) -> Any:
            if (log := current_log()) is None:
                return before(*args, **kwargs)
            log.guard(log.enter, Phase.CHECKPOINT)
            try:
                return before(*args, **kwargs)
            finally:
                log.guard(log.leave)

        return saved

    observed_of: dict[int, Any] = {}  # by the id of what it is in the place of

    def each(*names: str) -> Callable[[Any], None]:
        def put(module: Any) -> None:
            for name in names:
                if (before := getattr(module, name, None)) is not None:
                    patches.put(module, name, timed)
                    observed_of[id(before)] = getattr(module, name)

        return put

    each("save")(torch.serialization)
    patches.when_loaded("torch.distributed.checkpoint.state_dict_saver", each("save", "async_save"))
    patches.when_loaded("safetensors.torch", each("save_file"))
    _put_wherever_imported(observed_of)


def _put_wherever_imported(observed_of: dict[int, Any]) -> None:
    """Put functions where modules have imported, by any name, what they are in the place of.

    Read past the modules' own ``__getattribute__``: one that is loaded late would load.
    """
    for module in tuple(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            names = object.__getattribute__(module, "__dict__")
            for name, value in tuple(names.items()):
                if (after := observed_of.get(id(value))) is not None:
                    names[name] = after


FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def patch_fsdp(patches: Patches) -> None:
    """Watch sharded models, once what makes them is loaded."""

    def fsdp2(module: Any) -> None:
        patches.put_maker(module.FSDPState, FSDP2_INIT, "FSDP2", "fully_shard", fsdp2_device)
        patches.put(module.FSDPState, FSDP2_ROOT_PRE_FORWARD, _entered)
        patches.put(module.FSDPState, FSDP2_POST_FORWARD, _left)

    def fsdp1(module: Any) -> None:
        name = "FullyShardedDataParallel"
        patches.put_maker(module.FullyShardedDataParallel, "__init__", "FSDP1", name)
        patches.put(module.FullyShardedDataParallel, "forward", watched_forward)

    def waits(module: Any) -> None:
        patches.put(module.FSDPParamGroup, FSDP2_GATHER, _gathering)
        for name in FSDP2_WAITS:
            patches.put(module.FSDPParamGroup, name, meeting)

    patches.when_loaded(FSDP2_STATE, fsdp2)
    patches.when_loaded(FSDP2_GROUP, waits)
    patches.when_loaded(FSDP1, fsdp1)


def _gathering(before: Any, current_log: CurrentLog) -> Any:
    """Return a method that waits on a CPU alone."""
    waiting = meeting(before, current_log)

    def unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (waiting if self.device.type == "cpu" else before)(self, *args, **kwargs)

    return unshard


def _entered(before: Any, current_log: CurrentLog) -> Any:
    def root_pre_forward(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        log, was_root = current_log(), fsdp2_is_root(self)
        result = before(self, module, args, kwargs)
        if log is not None and not was_root and fsdp2_is_root(self):
            log.guard(log.forward_begins, module, (args, kwargs) if kwargs else args)
        return result

    return root_pre_forward


def _left(before: Any, current_log: CurrentLog) -> Any:
    def post_forward(self: Any, module: Any, inputs: Any, output: Any) -> Any:
        log, was_root = current_log(), fsdp2_is_root(self)
        result = before(self, module, inputs, output)
        if log is not None and was_root and not fsdp2_is_root(self):
            log.guard(log.forward_ends, result)
        return result

    return post_forward


@final
class Attachment:
    """Puts the patches there once, and has a watch for as long as a process group is open.

    Made in the process's ``sitecustomize`` when the first group opens.

    Args:
        settings: as the launcher wrote them down.
        when_loaded: has a call made when a module is loaded.
        loaders: those that were made; grows.

    Attributes:
        watch: the one on this process; None while no group is open.
    """

    def __init__(
        self, settings: str, when_loaded: WhenLoaded, loaders: Sequence[MadeLoader]
    ) -> None:
        self._settings = WatchSettings.read(settings)
        self._loaders = loaders
        self.watch: Watch | None = None
        self._num_groups = 0
        patches = Patches(self._current, self._current_log, when_loaded)
        for patch in (
            patch_collectives,
            patch_ddp,
            patch_compiled,
            patch_loaders,
            patch_saving,
            patch_fsdp,
        ):
            patch(patches)
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._forget)

    def group_opens(self) -> None:
        """Note that a default process group is open."""
        self._end()
        self._num_groups += 1
        self._tell_launcher()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            print(ALONE, file=sys.stderr, flush=True)
            return
        ends = ends_of(self._store(), rank, world_size, self._settings)
        self.watch = Watch(ends, loaders=self._loaders)

    def group_closes(self, group: Any) -> None:
        """Note that a group is about to be destroyed."""
        if group is None or group is dist.group.WORLD:
            self._end()

    def _current(self) -> Watch | None:
        if is_dynamo_compiling():  # first: a constant there, so that nothing is guarded
            return None
        watch = self.watch
        return None if watch is None or not watch.is_on else watch

    def _current_log(self) -> StepLog | None:
        if is_dynamo_compiling():  # first here too
            return None
        if (watch := self.watch) is None or (log := watch.log) is None:
            return None
        return log if log.thread_id == get_ident() and not watch.captures() else None

    def _store(self) -> Any:
        """Return the run's store, with a prefix of this group's own: a restart has another."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = default_store()
        if hasattr(store, "clone"):  # a connection of its own, that no wait of the script's holds
            store = store.clone()
        prefixed: Any = dist.distributed_c10d.PrefixStore
        return prefixed(f"evenstep_watch/{attempt}/{self._num_groups}", store)

    def _tell_launcher(self) -> None:
        folder = self._settings.launcher_dir
        if folder and Path(folder).is_dir():
            (Path(folder) / SEEN).touch()

    def _end(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()

    def _forget(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.forget()
