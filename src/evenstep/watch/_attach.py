"""Attach a watch to this process: what stands in for functions of torch, from its group on."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any, final

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
from ._courier import RecordSender
from ._recorder import StepLog
from ._start_watch import ALONE, SEEN, WatchSettings
from ._watch import Watch
from ._watched_run import Frames, MadeLoader

Observed = Callable[..., Any]
"""Called as ``observed(log, before, *args, **kwargs)`` in the place of ``before``."""

WhenLoaded = Callable[[str, Callable[[Any], None]], None]
"""Has a call made with a module, by its name, when it is loaded, or now if it is."""


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes, by its first parameter."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def watched_forward(log: StepLog, before: Any, module: Any, /, *inputs: Any, **kwargs: Any) -> Any:
    """Log a forward."""
    log.guard(log.forward_begins, module, (inputs, kwargs) if kwargs else inputs)
    output = before(module, *inputs, **kwargs)
    log.guard(log.forward_ends, output)
    return output


def called(log: StepLog, before: Any, module: Any, /, *inputs: Any, **kwargs: Any) -> Any:
    """Log the forward of a DDP that is compiled as a whole.

    DDP's own forward is in the graph then, where nothing of ours may be.
    """
    if isinstance(original_of(module), DistributedDataParallel):
        return watched_forward(log, before, module, *inputs, **kwargs)
    return before(module, *inputs, **kwargs)


def meeting(log: StepLog, before: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Log a method in which others are waited for."""
    if log.meets:
        return before(*args, **kwargs)
    log.meets, begin = True, log.clock.mark()
    try:
        return before(*args, **kwargs)
    finally:
        log.guard(log.met, begin)


def gathering(log: StepLog, before: Any, group: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Log a method that waits on a CPU alone."""
    if group.device.type == "cpu":
        return meeting(log, before, group, *args, **kwargs)
    return before(group, *args, **kwargs)


def entered(log: StepLog, before: Any, state: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Log where the forward of a sharded model begins, as its root is found."""
    was_root = fsdp2_is_root(state)
    result = before(state, module, args, kwargs)
    if not was_root and fsdp2_is_root(state):
        log.guard(log.forward_begins, module, (args, kwargs) if kwargs else args)
    return result


def left(log: StepLog, before: Any, state: Any, module: Any, inputs: Any, output: Any) -> Any:
    """Log where it ends."""
    was_root = fsdp2_is_root(state)
    result = before(state, module, inputs, output)
    if was_root and not fsdp2_is_root(state):
        log.guard(log.forward_ends, result)
    return result


def opened(log: StepLog, before: Any, loader: Any) -> Any:
    """Log when a loader is opened."""
    log.guard(log.input_begins)
    try:
        return before(loader)
    finally:
        log.guard(log.input_ends, False)


def read(log: StepLog, before: Any, batches: Any) -> Any:
    """Log when it is asked for a batch."""
    log.guard(log.input_begins)
    is_there = False
    try:
        batch = before(batches)
        is_there = True
        return batch
    finally:
        log.guard(log.input_ends, is_there)


def dispatched(log: StepLog, before: Any, loader: Any) -> Any:
    """Log when a loader of Accelerate's that reads on rank 0 hands out, on each rank.

    So all have the same steps.
    """
    batches = before(loader)
    while True:
        try:
            batch = read(log, next, batches)
        except StopIteration:
            return
        yield batch


def saved(log: StepLog, before: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Log when something is saved."""
    log.guard(log.enter, Phase.CHECKPOINT)
    try:
        return before(*args, **kwargs)
    finally:
        log.guard(log.leave)


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


@final
class Attachment:
    """Puts the patches there once, and has a watch for as long as a process group is open.

    Made in the process's ``sitecustomize`` when the first group opens.

    Args:
        settings: as the launcher wrote them down.
        when_loaded: has a call made when a module is loaded.
        loaders: those that were made; grows.
        frames: returns files and lines from the caller of its caller on, the innermost first.

    Attributes:
        watch: the one on this process; None while no group is open.
    """

    def __init__(
        self,
        settings: str,
        when_loaded: WhenLoaded,
        loaders: Sequence[MadeLoader],
        frames: Callable[[], Frames],
    ) -> None:
        self._settings = WatchSettings(**json.loads(settings))
        self._loaders, self._frames = loaders, frames
        self.watch: Watch | None = None
        self._num_groups = 0
        # All collectives wait for their work in Python, but DDP for its own in C++.
        self._put(dist.Work, "wait", meeting)
        self._put_maker(DistributedDataParallel, "__init__", "DDP", "DistributedDataParallel")
        self._put(DistributedDataParallel, "forward", watched_forward)
        self._put(DistributedDataParallel, SYNC_BUFFERS, meeting)
        self._put(DataLoader, "__iter__", opened)
        self._put(loader_iterators(), "__next__", self._read)
        when_loaded(
            EVAL_FRAME, lambda compiler: self._put(compiler.OptimizedModule, "__call__", called)
        )
        when_loaded(
            "accelerate.data_loader",
            lambda module: self._put(module.DataLoaderDispatcher, "__iter__", dispatched),
        )
        when_loaded(FSDP2_STATE, self._watch_fsdp2)
        when_loaded(FSDP2_GROUP, self._watch_gathers)
        when_loaded(FSDP1, self._watch_fsdp1)
        self._watch_saving(when_loaded)
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._forget)

    def group_opens(self) -> None:
        """Note that a default process group is open."""
        self._end()
        self._num_groups += 1
        folder = self._settings.launcher_dir
        if folder and Path(folder).is_dir():
            (Path(folder) / SEEN).touch()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            print(ALONE, file=sys.stderr, flush=True)
            return
        courier = RecordSender(self._store(), rank, world_size, self._settings)
        self.watch = Watch(courier, loaders=self._loaders)

    def group_closes(self, group: Any) -> None:
        """Note that a group is about to be destroyed."""
        if group is None or group is dist.group.WORLD:
            self._end()

    def _put(self, owner: Any, name: str, observed: Observed) -> None:
        """Put a function in the place of what ``owner`` calls ``name``, while there is a log."""
        before, current_log = getattr(owner, name), self._current_log

        @wraps(before)
        def patched(*args: Any, **kwargs: Any) -> Any:
            if (log := current_log()) is None:
                return before(*args, **kwargs)
            return observed(log, before, *args, **kwargs)

        setattr(owner, name, patched)

    def _put_maker(
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
        before = getattr(owner, name)

        @wraps(before)
        def make(model: Any, *args: Any, **kwargs: Any) -> None:
            before(model, *args, **kwargs)
            if not is_dynamo_compiling() and (watch := self.watch) is not None:
                watch.courier.guard(watch.model_made, kind, made, device_of(model), self._frames())

        setattr(owner, name, make)

    def _read(self, log: StepLog, before: Any, batches: Any) -> Any:
        """Log when a loader is asked for a batch, and which one training reads at first."""
        batch = read(log, before, batches)
        if log.num_stepped < 2 and not log.evaluates and (watch := self.watch) is not None:
            watch.courier.guard(watch.loader_read, batches)
        return batch

    def _watch_fsdp2(self, module: Any) -> None:
        state = module.FSDPState
        self._put_maker(state, FSDP2_INIT, "FSDP2", "fully_shard", fsdp2_device)
        self._put(state, FSDP2_ROOT_PRE_FORWARD, entered)
        self._put(state, FSDP2_POST_FORWARD, left)

    def _watch_gathers(self, module: Any) -> None:
        self._put(module.FSDPParamGroup, FSDP2_GATHER, gathering)
        for name in FSDP2_WAITS:
            self._put(module.FSDPParamGroup, name, meeting)

    def _watch_fsdp1(self, module: Any) -> None:
        kind = module.FullyShardedDataParallel
        self._put_maker(kind, "__init__", "FSDP1", "FullyShardedDataParallel")
        self._put(kind, "forward", watched_forward)

    def _watch_saving(self, when_loaded: WhenLoaded) -> None:
        observed_of: dict[int, Any] = {}  # by the id of what it is in the place of

        def each(*names: str) -> Callable[[Any], None]:
            def put(module: Any) -> None:
                for name in names:
                    if (before := getattr(module, name, None)) is not None:
                        self._put(module, name, saved)
                        observed_of[id(before)] = getattr(module, name)

            return put

        each("save")(torch.serialization)
        when_loaded("torch.distributed.checkpoint.state_dict_saver", each("save", "async_save"))
        when_loaded("safetensors.torch", each("save_file"))
        _put_wherever_imported(observed_of)

    def _current_log(self) -> StepLog | None:
        if is_dynamo_compiling():  # first: a constant there, so that nothing is guarded
            return None
        if (watch := self.watch) is None or (log := watch.log) is None:
            return None
        return log if log.thread_id == get_ident() and not watch.courier.captures() else None

    def _store(self) -> Any:
        """Return the run's store, with a prefix of this group's own: a restart has another."""
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = default_store()
        if hasattr(store, "clone"):  # a connection of its own, that no wait of the script's holds
            store = store.clone()
        prefixed: Any = dist.distributed_c10d.PrefixStore
        return prefixed(f"evenstep_watch/{attempt}/{self._num_groups}", store)

    def _end(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()

    def _forget(self) -> None:
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.forget()
