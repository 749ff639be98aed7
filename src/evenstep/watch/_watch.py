"""One rank's watch: what the patches tell, a thread that sends it, and its end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, final

import torch
from torch import nn

from .._diagnosis import Phase
from .._run._garbage_clock import GarbageClock
from .._run._host_reader import HostReader
from ..torch._memory_reader import alloc_retries
from ..torch._step._clock import clock_of
from ..torch._step._compile_clock import CompileClock
from ._call_sites import Frames, site_of
from ._courier import Courier, RankEnds, say_off
from ._mail import RankHello
from ._recorder import StepRecorder
from ._step_log import StepLog
from ._watched_run import CallSite

_P = ParamSpec("_P")
_MOST_HEARD = 2048  # that the thread that sends has not taken: of 200 steps or so, 0.3 MB


def _quiet(
    method: Callable[Concatenate[Watch, _P], None],
) -> Callable[Concatenate[Watch, _P], None]:
    """Have a fault of the watch's own switch it off, whatever is under way."""

    def quiet(self: Watch, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.is_on:
            begin = perf_counter()
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self.switch_off(error)
            self.inline_s += perf_counter() - begin

    return quiet


@final
class Watch:
    """Watches the steps of this process, from its first model until its group closes.

    Args:
        ends: of this rank, of what ranks tell.
        loaders: data sets' ids and frames of the loaders that were made; grows.

    Attributes:
        is_on: whether it still watches.
        inline_s: seconds that it took of the thread that trains, so far.
    """

    def __init__(
        self,
        ends: RankEnds,
        *,
        loaders: Sequence[tuple[int, Frames]],
    ) -> None:
        self.is_on = True
        self.inline_s = 0.0
        self._ends = ends
        self._loaders = loaders
        self._kind = ""
        self._sites: dict[str, CallSite] = {}
        self._log: StepLog | None = None
        self._recorder: StepRecorder | None = None
        self._meets = False  # whether others are waited for
        self._garbage = GarbageClock()
        self._compiling = CompileClock()
        self._courier: Courier | None = None

    @property
    def thread_s(self) -> float:
        """CPU seconds of its own thread, so far."""
        return 0.0 if self._courier is None else self._courier.thread_s

    @property
    def num_bytes(self) -> int:
        """Bytes sent so far; none on rank 0, which tells itself."""
        return 0 if self._ends.sender is None else self._ends.sender.num_bytes

    @_quiet
    def model_made(self, kind: str, made: str, device: torch.device, frames: Frames) -> None:
        """Hear that a model was wrapped, and begin to watch if it is the first."""
        self._kind = kind
        self._sites.setdefault(made, site_of(made, frames))
        if self._log is None:
            self._begin(device)

    @_quiet
    def mixes(self) -> None:
        """Hear that computing and waiting cannot be told apart in the model."""
        if self._log is not None:
            self._log.mixes()

    @_quiet
    def input_begins(self) -> None:
        """Hear that a loader is asked for a batch; other threads do not count."""
        if (log := self._log) is not None and get_ident() == log.thread_id:
            log.input_begins()

    @_quiet
    def input_ends(self, dataset: Any, is_there: bool) -> None:
        """Hear that it came, or that there is none any more."""
        if (log := self._log) is not None and get_ident() == log.thread_id:
            log.input_ends(is_there=is_there)
            if log.num_stepped < 2 and is_there:
                self._note_loader(dataset)

    @_quiet
    def forward_begins(self, module: nn.Module, inputs: Any) -> None:
        """Hear that a model begins to compute."""
        if (log := self._log) is not None and get_ident() == log.thread_id:
            self._compiling.listen()
            log.forward_begins(module, inputs)
            if len(log.heard) >= _MOST_HEARD and self._recorder is not None:
                self._recorder.catch_up()

    @_quiet
    def forward_ends(self, output: Any) -> None:
        """Hear that it is done."""
        if (log := self._log) is not None and get_ident() == log.thread_id:
            log.forward_ends(output)

    @_quiet
    def met(self, begin: Any) -> None:
        """Hear that others were waited for, since a mark."""
        if (log := self._log) is not None and begin is not None:
            self._meets = False
            log.met(begin)

    def mark(self) -> Any:
        """Return a mark for ``met``; None where nothing is watched, or in another such wait."""
        log = self._log
        if log is None or not self.is_on or self._meets or get_ident() != log.thread_id:
            return None
        self._meets = True
        return log.clock.mark()

    @_quiet
    def enter(self, phase: Phase) -> None:
        """Hear that something else begins, such as a checkpoint."""
        if self._log is not None:
            self._log.enter(phase)

    @_quiet
    def leave(self) -> None:
        """Hear that it is over."""
        if self._log is not None:
            self._log.leave()

    @_quiet
    def close(self) -> None:
        """Send the last, and on rank 0 say what was seen."""
        if self._courier is not None:
            self._courier.close(
                self._kind, tuple(self._sites.values()), own_s=lambda: self.inline_s + self.thread_s
            )
        self._stop()

    def switch_off(self, error: BaseException) -> None:
        """Watch no more, say so in a line, and let the training go on."""
        if not self.is_on:
            return
        self._stop()
        say_off(self._ends.rank, error)

    def forget(self) -> None:
        """Watch no more, as in a process that was forked from one that trains."""
        self.is_on = False
        self._garbage.close()

    def _stop(self) -> None:
        self.is_on = False
        if self._courier is not None:
            self._courier.stop()
        with suppress(Exception):
            self._garbage.close()
            self._compiling.close()
            if self._log is not None:
                self._log.close()

    def _begin(self, device: torch.device) -> None:
        self._garbage.open()
        self._log = StepLog(
            clock_of(device),
            counted_s=lambda: (self._garbage.total_s, self._compiling.total_s),
            guard=self._guard,
        )
        self._recorder = StepRecorder(self._log)
        self._courier = Courier(
            self._recorder,
            RankHello(socket.gethostname(), device_in_words(device)),
            HostReader(alloc_retries=partial(alloc_retries, device)),
            self._ends,
            on_fault=self.switch_off,
        )
        self._courier.open()

    def _guard(self, call: Callable[[], None]) -> None:
        if self.is_on:
            begin = perf_counter()
            try:
                call()
            except Exception as error:
                self.switch_off(error)
            self.inline_s += perf_counter() - begin

    def _note_loader(self, dataset: Any) -> None:
        for number, frames in self._loaders:
            if number == id(dataset):
                self._sites["DataLoader"] = site_of("DataLoader", frames)


def device_in_words(device: torch.device) -> str:
    """Return a device with its name, as events have it."""
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_name(device)}"
