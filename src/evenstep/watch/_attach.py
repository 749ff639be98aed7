"""Attach a watch to this process, from the moment its process group is open."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import get_ident
from typing import Any, final

import torch.distributed as dist
from torch.compiler import is_dynamo_compiling

from .._private_torch import default_store
from ._courier import ends_of
from ._recorder import StepLog
from ._start_watch import ALONE, SEEN, WatchSettings
from ._torch_patches import (
    Patches,
    WhenLoaded,
    patch_collectives,
    patch_compiled,
    patch_ddp,
    patch_fsdp,
    patch_loaders,
    patch_saving,
)
from ._watch import Watch
from ._watched_run import MadeLoader


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
        """Hear that a default process group is open."""
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
        """Hear that a group is about to be destroyed."""
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
