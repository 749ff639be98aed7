"""Model, optimizer, loader and balancer on the disk: together, all or nothing."""

from __future__ import annotations

import copy
import io
import operator
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from ..._diagnosis import Phase
from ..._types import check_range
from ..._warning import warn
from ...exceptions import CheckpointError, invalid
from .._balancer import Balancer
from .._exchange._crew import Crew
from . import _step_folder as disk
from ._step_folder import check_plain, read_plain


class Drain:
    """Turns SIGTERM on any rank into one decision of all: stop after this very step.

    Usage:
        with Drain(balancer) as drain:
            for x, y in loader:
                ...
                if drain.requested:
                    checkpoint.save(step)
                    break

    The notice travels with the messages of the steps, so it costs nothing until it is needed. If a
    rank gets the signal in step $k$, ``requested`` is true on all ranks in step $k + 1$ ($k + 2$ on
    CUDA), as soon as the loop has that step's batch. All ranks save the same step, leave the loop
    together, and end with exit code 0. A server that gets the signal passes it to the workers, and
    its own loop ends after theirs.

    Right if there are several steps between notice and end. A process that has not begun its first
    step has nothing to save, and ends as without a drain. So does a process that gets the signal
    when another worker is lost, because torchrun ends the survivors in this way before a restart.
    A second signal has its usual effect.

    Args:
        balancer: the balancer whose ranks agree.
        signals: the signals that are notices. torchrun passes SIGTERM on, and schedulers and
            clouds send it.

    Raises:
        ValueError: ``signals`` is empty or holds what cannot be caught.
    """

    def __init__(
        self,
        balancer: Balancer,
        *,
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        self._signals = tuple(signals)
        if not self._signals or {signal.SIGKILL, signal.SIGSTOP} & set(self._signals):
            raise invalid(
                "Drain(signals=...)",
                "name at least one signal, and only signals that can be caught",
                self._signals,
                "Leave it out for SIGTERM.",
            )
        self._balancer, self._session = balancer, balancer._session
        self._former: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether to stop after the step under way: the same on all ranks.

        True from the step after the notice on. With steps of a few milliseconds, of which several
        have one plan, it may be up to 50 ms later. It then stays true, also after the loop.
        """
        return self._session.steps.stopping

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "Python gets signals in the main thread only: enter `Drain` there. Ray Train runs "
                "scripts in another thread: save when `ray.train.get_preemption_info()` returns a "
                "notice."
            )
        for number in self._signals:
            self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *raised: object) -> None:
        self._give_back()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        service = self._balancer._parts.service
        asked = self._session.ask_to_stop() if service is None else service.ask_to_stop()
        self._give_back()
        if not asked:
            signal.raise_signal(number)  # to the handler that was there before

    def _give_back(self) -> None:
        """Restore the former handlers of the signals."""
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


_T = TypeVar("_T")


@final
class Ranks:
    """All ranks of the default group, or a balancer's workers where some of its ranks serve.

    Args:
        balancer: what may have servers; anything else has none.
    """

    def __init__(self, balancer: object) -> None:
        self._balancer = balancer if isinstance(balancer, Balancer) else None

    @property
    def is_server(self) -> bool:
        """Whether this rank has nothing of the training to save."""
        return self._crew is not None and self._crew.is_server

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of these ranks; None is the default one."""
        crew = self._crew
        return crew.workers if crew is not None and crew.num_servers else None

    @property
    def rank(self) -> int:
        """This one's."""
        return dist.get_rank(self.group) if self._are_several() else 0

    @property
    def world_size(self) -> int:
        """Their number."""
        return dist.get_world_size(self.group) if self._are_several() else 1

    def saving(self) -> AbstractContextManager[None]:
        """Return a context whose time is that of a checkpoint, as far as a balancer knows of it."""
        own = self._balancer
        return nullcontext() if own is None else own._parts.steps.timed(Phase.CHECKPOINT)

    def share(self, call: Callable[[], Any], path: Path) -> Any:
        """Return on every rank what ``call`` gives on the first."""
        return self.together(lambda: call() if self.rank == 0 else None, path)[0]

    def on_all(self, call: Callable[[], _T], path: Path) -> _T:
        """Return what ``call`` gives on this rank, once all are known to have done well."""
        held: list[_T] = []
        self.together(lambda: held.append(call()), path)
        return held[0]

    def together(self, call: Callable[[], Any], path: Path) -> list[Any]:
        """Return what ``call`` gives on every rank, or raise on all what it raised on any.

        An error that not all of them had names the first rank that did.
        """
        value, problem = None, None
        try:
            value = call()
        except Exception as error:  # whatever it is, the others wait
            problem = self._portable(error, path)
        answers = [(value, problem)]
        if self.world_size > 1:
            answers = [(None, None)] * self.world_size
            dist.all_gather_object(answers, (value, problem), group=self.group)
        is_everybodys = all(raised is not None for _, raised in answers)
        for rank, (_, raised) in enumerate(answers):
            if type(raised) is ValueError and not is_everybodys:
                raise ValueError(f"on rank {rank}, ValueError: {raised}") from raised
            if raised is not None:
                raise raised
        return [answer for answer, _ in answers]

    def _portable(self, error: Exception, path: Path) -> Exception:
        """Return an error that says the same on another rank, of a kind that is documented."""
        if isinstance(error, OSError):
            return CheckpointError(f"`{path}`: {error}.", path)
        said = type(error) is ValueError and all(type(each) is str for each in error.args)
        if said or type(error) is CheckpointError:
            return error
        where = f"on rank {self.rank}, {type(error).__name__}"
        problem = CheckpointError(f"`{path}`: {where}: {error}", path)
        problem.__cause__ = error  # for this rank's own traceback; pickling leaves it out
        return problem

    @property
    def _crew(self) -> Crew | None:
        """The balancer's ranks, once it has prepared something."""
        return None if self._balancer is None else self._balancer._parts.crew

    def _are_several(self) -> bool:
        return dist.is_available() and dist.is_initialized()


_PLAIN = "plain.pt"  # whatever is not the model's nor the optimizer's


class HasState(Protocol):
    """A loader, a balancer, a scheduler, a scaler: anything whose state can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, of plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Load a state."""
        ...


class Checkpoint:
    """Saves and loads all that a run needs to continue, on any number of ranks.

    Usage:
        checkpoint = Checkpoint(
            "runs/first/checkpoints",
            model=model,
            optimizer=optimizer,
            loader=loader,
            balancer=balancer,
        )
        step = checkpoint.load() or 0
        for x, y in loader:
            ...
            step += 1
            if step % 100 == 0:
                checkpoint.save(step)

    ``torch.distributed.checkpoint`` writes model and optimizer, each rank its part, so DDP and
    FSDP2 models load at any world size. The keys are those of the plain model. Rank 0 writes the
    other parts, which are the same on all ranks.

    Saves are atomic: everything is written into a temporary folder, synced to disk with a SHA-256
    of every file, and renamed. If a process dies during a save, the checkpoint before remains. If
    the file system loses data, the checksums detect it: ``load`` warns, and loads the checkpoint
    before. Only tensors and plain values are unpickled (``weights_only=True``).

    Right for a folder that all ranks share, such as on NFS. The random generators of the ranks are
    not saved: dropout draws other numbers after a restart.

    Args:
        folder: holds the checkpoints, in folders named after their steps. Made if it is not
            there.
        model: the model, prepared or plain; several models in a mapping, by name.
        optimizer: its optimizer; several in a mapping, by name. None saves none.
        loader: the prepared loader.
        balancer: the balancer, which knows what was learnt about the workers. Needed if there are
            servers, which take no part in a save.
        others: schedulers, gradient scalers and similar objects, by name.
        keep: number of newest checkpoints that stay, at least 1. With 2, a damaged one costs no
            more than the steps between two checkpoints.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        loader: HasState | None = None,
        balancer: HasState | None = None,
        others: Mapping[str, HasState] | None = None,
        keep: int = 2,
    ) -> None:
        if "://" in str(folder):
            remedy = "Give a path, such as that of a bucket that is mounted."
            raise invalid("Checkpoint(folder)", "be a folder of a file system", folder, remedy)
        check_range("Checkpoint(keep=...)", keep, "at least 1", "2 outlives a damaged one.")
        named = {"loader": loader, "balancer": balancer, **(others or {})}
        for name, part in named.items():
            if part is not None and not hasattr(part, "load_state_dict"):
                raise invalid(
                    f"Checkpoint({name}=...)",
                    "have `state_dict` and `load_state_dict`",
                    type(part).__name__,
                    "Give the loader that `prepare` returned, or wrap what is to be saved.",
                )
        if taken := {"loader", "balancer"} & (others or {}).keys():
            raise invalid(
                "Checkpoint(others=...)",
                "use names of its own",
                sorted(taken),
                "Give these by their own arguments.",
            )
        # Here, as it imports half a second of torch's that many a script never needs.
        from ._tensors import Tensors

        self._ranks = Ranks(balancer)
        self._root = Path(folder).absolute()  # a script may change its own folder later
        self._tensors = Tensors(model, optimizer)
        self._plain = {name: part for name, part in named.items() if part is not None}
        self._keep = keep
        self._known_broken: set[Path] = set()

    def save(self, step: int) -> Path:
        """Write a checkpoint and return its folder. Collective: all ranks, after the same step.

        On a server it does nothing: workers save among themselves.

        Args:
            step: optimizer steps done so far, an integer of at least 0 and less than 10**15.

        Raises:
            CheckpointError: it could not be written, on any rank; the ones before stay.
            ValueError: ``step`` is out of range, or a part's state would not load again.
        """
        try:
            step = operator.index(step)  # of NumPy and in tensors too
        except TypeError:
            remedy = "Count steps in integers."
            raise invalid("Checkpoint.save(step)", "be an integer", repr(step), remedy) from None
        if not 0 <= step <= disk.MOST_STEPS:
            rule = "be at least 0" if step < 0 else f"be at most {disk.MOST_STEPS}"
            raise invalid("Checkpoint.save(step)", rule, step, "Count steps from 0.")
        if self._ranks.is_server:
            return disk.complete_folder(self._root, step)
        path = disk.partial_folder(self._root, step)
        with self._ranks.saving():
            try:
                self._save(step, path)
            except BaseException:
                if self._ranks.rank == 0 and path.exists():
                    disk.clear_away(path)
                raise
        return disk.complete_folder(self._root, step)

    def load(self) -> int | None:
        """Load the newest complete checkpoint and return its step; None if there is none yet.

        Collective; before the first loop over the loader. A damaged one is skipped with a
        warning. What goes wrong on one rank is raised on all, and leaves model, optimizer and
        parts as they were. An interrupt, as by Ctrl+C, leaves them as far as they were loaded.

        Raises:
            CheckpointError: there are checkpoints and all are damaged, or the one found is of
                another model, was renamed or lacks a part.
            ValueError: a part refuses its state, such as a loader with another global batch.
        """
        folders: list[tuple[int, Path]] = self._ranks.share(
            lambda: disk.complete_folders(self._root), self._root
        )
        problem: CheckpointError | None = None
        for step, there in folders:
            path = self._root / there.name  # which may have another name on rank 0
            problem = self._problem(path)
            if problem is None:
                self._take(path, step)
                return step
            self._known_broken.add(path)
            if self._ranks.rank == 0:
                warn(f"{problem} The checkpoint before it is taken, if there is one.")
        if problem is not None:
            raise CheckpointError(
                f"`{self._root}` holds no checkpoint that can be loaded. The oldest: {problem}",
                problem.path,
            ) from problem
        return None

    def _save(self, step: int, path: Path) -> None:
        plain = self._ranks.on_all(lambda: self._plain_bytes(step), path)
        self._ranks.share(lambda: self._begin(step), path)
        self._ranks.together(lambda: _check_shared(path, self._ranks.rank), path)
        states = self._ranks.on_all(self._tensors.collect, path)
        index = self._tensors.save(path, states, self._ranks.group)
        self._ranks.share(lambda: self._tensors.save_index(path, index), path)
        digests = self._ranks.together(lambda: _digests(path, self._ranks.rank), path)
        merged = {name: summed for part in digests for name, summed in part.items()}
        self._ranks.share(lambda: self._finish(step, plain, merged), path)

    def _begin(self, step: int) -> None:
        for newer, path in disk.complete_folders(self._root):
            if newer > step and path in self._known_broken:
                disk.clear_away(path)
            elif newer > step:
                raise CheckpointError(
                    f"`{path}` is newer than the step {step} to be saved. Call `load` before "
                    f"training, or give a new run a folder of its own.",
                    path,
                )
        disk.begin(self._root, step)

    def _finish(self, step: int, plain: bytes, digests: dict[str, str]) -> None:
        """Write the rest, seal it, and let the oldest go."""
        file = disk.partial_folder(self._root, step) / _PLAIN
        disk.write(file, plain)
        digests = {**digests, _PLAIN: disk.digest(file)}
        disk.seal(self._root, step, world_size=self._ranks.world_size, digests=digests)
        # First what is of no use, so that it does not count for one to fall back on.
        self._known_broken.discard(disk.complete_folder(self._root, step))
        folders = [path for _, path in disk.complete_folders(self._root)]
        good = [path for path in folders if path not in self._known_broken]
        for path in [*(set(folders) & self._known_broken), *good[self._keep :]]:
            disk.clear_away(path)

    def _plain_bytes(self, step: int) -> bytes:
        """Return the states of everything but model and optimizer, which load as they are."""
        states = {name: part.state_dict() for name, part in self._plain.items()}
        for name, state in states.items():
            check_plain(name, state)
        file = io.BytesIO()
        torch.save({"step": step, **{f"part.{name}": states[name] for name in states}}, file)
        return file.getvalue()

    def _problem(self, path: Path) -> CheckpointError | None:
        """Return what is wrong with a checkpoint, the same on all ranks."""
        try:
            digests = self._ranks.share(lambda: disk.read_manifest(path), path)
            names = sorted(digests)[self._ranks.rank :: self._ranks.world_size]
            self._ranks.together(lambda: disk.check_files(path, digests, names), path)
        except CheckpointError as error:
            return error
        return None

    def _take(self, path: Path, step: int) -> None:
        """Load all of a checkpoint, or raise on all ranks and leave everything as it was.

        A file that can no longer be read after its checksum was right is beyond this promise.
        """
        parts = self._ranks.on_all(lambda: self._read_plain(path, step), path)
        if unused := sorted(parts.keys() - self._plain.keys()):
            warn(f"`{path}` holds {unused} as well, which was not asked for: not loaded.")
        before = self._parts_now()
        try:
            with self._tensors.begun():
                states = self._ranks.on_all(lambda: self._tensors.places(path), path)
                self._ranks.on_all(lambda: self._load_parts(parts), path)
                group = self._ranks.group
                self._ranks.on_all(lambda: self._tensors.load(path, states, group), path)
        except Exception:  # an interrupt may be for a part that hangs: it is not called again
            for name, state in before.items():
                with suppress(Exception):  # what matters is being raised already
                    self._plain[name].load_state_dict(state)
            raise

    def _read_plain(self, path: Path, step: int) -> dict[str, Any]:
        """Return the states of the parts, once they are what is asked for."""
        with disk.reading(path / _PLAIN), (path / _PLAIN).open("rb") as file:
            plain: dict[str, Any] = read_plain(file)
            then = int(plain.pop("step"))
            parts = {name.removeprefix("part."): state for name, state in plain.items()}
        if then != step:
            raise CheckpointError(
                f"`{path}` was saved after step {then} and renamed since. Give it back its name.",
                path,
            )
        if missing := sorted(self._plain.keys() - parts.keys()):
            raise CheckpointError(
                f"`{path}` was saved without {missing}. Load it as it was saved, or leave out "
                f"what starts anew.",
                path,
            )
        return parts

    def _load_parts(self, states: dict[str, Any]) -> None:
        for name, part in self._plain.items():
            part.load_state_dict(states[name])

    def _parts_now(self) -> dict[str, Any]:
        """Return copies of the parts' states, of all that have one before a run begins."""
        states = {}
        for name, part in self._plain.items():
            with suppress(Exception):
                states[name] = copy.deepcopy(part.state_dict())
        return states


def _digests(path: Path, rank: int) -> dict[str, str]:
    """Return the checksums of what this rank wrote, and on rank 0 of both indices."""
    mine = list(path.glob(f"__{rank}_*"))
    if rank == 0:
        mine += [path / ".metadata", path / disk.INDEX]
    return {file.name: disk.digest(file) for file in mine}


def _check_shared(path: Path, rank: int) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"`{path.parent}` is not the same folder on all ranks: rank {rank} does not see "
            f"what rank 0 made. Give a folder that all of them share.",
            path,
        )
