"""The tensors of a checkpoint: models and optimizers, whole or sharded, under their plain names.

Torch's own reader unpickles its index, and so runs what a file asks for. So the index is written
once more, as ``torch.save`` does, and read as weights are: torch makes no object but of the classes
that are named here.
"""

from __future__ import annotations

import copy
import inspect
import io
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import metadata as indexed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..._private_torch import checkpoint_classes
from ...exceptions import CheckpointError, invalid
from ._step_folder import INDEX, check_plain, check_unpacked, read_plain, reading, write

CLASSES: Final = (
    indexed.BytesStorageMetadata,
    indexed.ChunkStorageMetadata,
    indexed.Metadata,
    indexed.MetadataIndex,
    indexed.TensorProperties,
    indexed.TensorStorageMetadata,
    *checkpoint_classes(),
)
"""What an index is made of: dataclasses and enums of torch's, which do nothing."""


class SafeReader(FileSystemReader):
    """Torch's reader of a folder, whose index holds harmless classes or is refused.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.transforms = self  # type: ignore[assignment]  # of those, torch calls one method

    def read_metadata(self, *args: Any, **kwargs: Any) -> indexed.Metadata:
        """Return the index.

        Raises:
            CheckpointError: it cannot be read so, or leads out of its folder.
        """
        path = Path(self.path) / INDEX
        with reading(path):
            with path.open("rb") as file, torch.serialization.safe_globals(list(CLASSES)):
                metadata = read_plain(file)
            return self._checked(metadata, path)

    def transform_load_stream(
        self, item: ReadItem, packed: Sequence[str], raw: io.RawIOBase
    ) -> io.RawIOBase:
        """Return the stream of an item as it is: torch's own would unpack what the index says.

        Raises:
            ValueError: it unpacks to more than it is.
        """
        check_unpacked(_View(raw))
        return raw

    def _checked(self, metadata: Any, path: Path) -> indexed.Metadata:
        if not isinstance(metadata, indexed.Metadata):
            raise CheckpointError(f"`{path}` is no index of a checkpoint.", path)
        for stored in (metadata.storage_data or {}).values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise CheckpointError(
                    f"`{path}` reads from `{stored.relative_path}`, outside of its folder: it is "
                    f"refused.",
                    path,
                )
        metadata.storage_meta = indexed.StorageMeta(load_id=self.load_id)
        return metadata


class _View:
    """An item as zipfile reads it, from its end: torch's streams count from there the wrong way."""

    def __init__(self, raw: io.RawIOBase) -> None:
        raw.seek(0, os.SEEK_END)
        self._raw, self._size = raw, raw.tell()
        self.read, self.tell = raw.read, raw.tell

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_CUR: self.tell(), os.SEEK_END: self._size}.get(whence, 0)
        self._raw.seek(place)
        return place


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner, which reads plain values as it reads tensors: with ``weights_only``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse whatever is no plain value, then let torch load it."""
        read_plain(value)
        value.seek(0)
        super().load_bytes(read_item, value)


class Tensors:
    """Models and optimizers as ``torch.distributed.checkpoint`` sees them.

    Args:
        model: one, or several by name.
        optimizer: one, several by name, or None.

    Raises:
        ValueError: they are no modules or no optimizers, or an optimizer could not be loaded.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
    ) -> None:
        models = _named("model", model, nn.Module)
        self._optimizers: dict[str, torch.optim.Optimizer] = {}  # by what their states are called
        if optimizer is not None:
            for name, value in _named("optimizer", optimizer, torch.optim.Optimizer).items():
                _check_begins(value)
                self._optimizers[f"optimizer {name}".strip()] = value
        # A parent lends several models their names; they do not notice.
        self._model: nn.Module = models[""] if "" in models else nn.ModuleDict(models)

    def collect(self) -> dict[str, Any]:
        """Return what is to be written, and leave it as it is. On every rank.

        An optimizer that has not stepped yet has nothing.

        Raises:
            ValueError: a setting of the optimizer's would not load again.
        """
        with ExitStack() as held:
            for optimizer in self._optimizers.values():
                held.enter_context(_unbegun(optimizer))
            states = self._states()
        check_plain("optimizer", list(_leaves(states)))
        return states

    def save(
        self, path: Path, states: dict[str, Any], group: dist.ProcessGroup | None = None
    ) -> Any:
        """Write what ``collect`` gave into ``path``; return its index. Collective over ``group``.

        Raises:
            CheckpointError: a rank could not write.
        """
        with _explained(path, "could not be written"):
            writer, alone = FileSystemWriter(path), _is_alone()
            return save(states, storage_writer=writer, process_group=group, no_dist=alone)

    @staticmethod
    def save_index(path: Path, index: indexed.Metadata) -> None:
        """Write what ``save`` returned into ``path``, for ``SafeReader``. On one rank."""
        plain = copy.copy(index)
        plain.storage_meta = None  # it names the folder, which may be moved
        file = io.BytesIO()
        torch.save(plain, file)
        write(path / INDEX, file.getvalue())

    def places(self, path: Path) -> dict[str, Any]:
        """Return where ``load`` is to put what is in ``path``. On every rank.

        Raises:
            CheckpointError: what is there belongs to another model or optimizer.
        """
        saved = SafeReader(path).read_metadata().state_dict_metadata
        states = self._states()
        _drop_unused(states, saved)
        _check_names(path, states, saved)
        return states

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Give optimizers that had no state yet none again, should anything be raised inside."""
        unbegun = [each for each in self._optimizers.values() if not each.state]
        try:
            yield
        except BaseException:
            for optimizer in unbegun:
                optimizer.state.clear()
            raise

    def load(
        self, path: Path, states: dict[str, Any], group: dist.ProcessGroup | None = None
    ) -> None:
        """Load them from ``path`` into what ``places`` gave. Collective over ``group``.

        Raises:
            CheckpointError: what is there is of other shapes, or cannot be read.
        """
        with reading(path), _explained(path, "does not fit this model and optimizer"):
            load(
                states,
                storage_reader=SafeReader(path),
                planner=SafePlanner(),
                process_group=group,
                no_dist=_is_alone(),
            )
            set_model_state_dict(self._model, states["model"])
            options = StateDictOptions(strict=False)  # names were compared above
            for name, optimizer in self._optimizers.items():
                set_optimizer_state_dict(self._model, optimizer, states[name], options=options)

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {"model": get_model_state_dict(self._model)}
        for name, optimizer in self._optimizers.items():
            states[name] = get_optimizer_state_dict(self._model, optimizer)
        return states


@contextmanager
def _unbegun(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from stepping an optimizer without a state in order to give it one.

    It does so where no parameter has a gradient. Adam would count that step from then on.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if optimizer.state or any(each.grad is not None for each in parameters):
        yield
        return
    least = min(parameters, key=torch.Tensor.numel)
    least.grad = torch.zeros_like(least)
    try:
        yield
    finally:
        least.grad = None


def _leaves(state: Any) -> Iterator[Any]:
    """Yield everything in a nested state that is no tensor."""
    if isinstance(state, dict):
        for value in state.values():
            yield from _leaves(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _leaves(value)
    elif not isinstance(state, torch.Tensor):
        yield state


def _named(argument: str, given: Any, kind: type[Any]) -> dict[str, Any]:
    """Return what was given by name, a single one as ``""``."""
    named = dict(given) if isinstance(given, Mapping) else {"": given}
    for value in named.values():
        if not isinstance(value, kind):
            raise invalid(
                f"Checkpoint({argument}=...)",
                f"be one {kind.__name__}, or several by name",
                type(value).__name__,
                "Schedulers and the like go into `others`.",
            )
    return named


def _check_begins(optimizer: torch.optim.Optimizer) -> None:
    """Raise for an optimizer that would be saved, and could not be loaded.

    Torch loads into a state that is there. A new optimizer gets one by ``step(closure=None)``.
    """
    takes = inspect.signature(type(optimizer).step).parameters
    closure = takes.get("closure")
    has_default = closure is not None and closure.default is not inspect.Parameter.empty
    if has_default or any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        return
    raise invalid(
        "Checkpoint(optimizer=...)",
        "be loadable: torch begins a new optimizer by `step(closure=None)`",
        f"{type(optimizer).__name__}.step{inspect.signature(type(optimizer).step)}",
        "Give the optimizer by name in `others`, where every rank holds the whole model. Or have "
        "its `step` work without a closure.",
    )


def _drop_unused(states: dict[str, Any], saved: Iterable[str]) -> None:
    """Ask for no state of parameters that had none, as they never had a gradient."""
    known = set(saved)
    for part, state in states.items():
        if part == "model" or "state" not in state:
            continue
        state["state"] = {
            name: values
            for name, values in state["state"].items()
            if any(f"{part}.state.{name}.{key}" in known for key in values)
        }


def _check_names(path: Path, states: dict[str, Any], saved: Iterable[str]) -> None:
    """Raise unless all that was saved is asked for, and the other way round."""
    saved = set(saved)
    asked = set(_names(states))
    # A scheduler adds settings to the groups: one that is made later will do so.
    lost = sorted(name for name in saved - asked if ".param_groups." not in name)
    missing = sorted(asked - saved)
    if lost or missing:
        which = f"it lacks {missing[0]!r}" if missing else f"it has {lost[0]!r}"
        raise CheckpointError(
            f"`{path}` is of another model or optimizer: {which}, one of "
            f"{len(lost) + len(missing)} names that differ. Build both as they were saved.",
            path,
        )


def _names(state: Any, prefix: str = "") -> Iterable[str]:
    """Yield the names under which torch's checkpoints keep the values of a nested state."""
    if isinstance(state, dict):
        items: Iterable[tuple[Any, Any]] = state.items()
    elif isinstance(state, list) and any(isinstance(v, (dict, torch.Tensor)) for v in state):
        items = enumerate(state)
    else:
        yield prefix.removesuffix(".")
        return
    for key, value in items:
        yield from _names(value, f"{prefix}{key}.")


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Say ``what`` of ``path`` failed, and why; leave out that there is one process only: we know.

    Raises:
        CheckpointError: torch could not do it on some rank.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (problem, _) = min(error.failures.items())
        text = f"on rank {rank}, {type(problem).__name__}: {problem}"
        # All that torch's writer of archives says where the disk takes less than it was given.
        full = ". The disk may be full" if "unexpected pos" in text else ""
        raise CheckpointError(f"`{path}` {what}: {text}{full}", path) from error
