"""One rank's watch: what the patches report, a thread that sends it, and its end."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, final

import torch

from .._host import GarbageClock, HostReader
from .._private_torch import dataset_of, indices_of
from .._torch_clock import CompileClock, alloc_retries, clock_of, describe_device
from ._courier import RecordSender, say_off
from ._recorder import StepLog, StepRecorder
from ._watched_run import CallSite, Frames, MadeLoader, site_of


@final
class Watch:
    """Watches the steps of this process, from its first model until its group closes.

    Args:
        courier: carries this rank's reports.
        loaders: those that were made; grows.

    Attributes:
        courier: likewise.
        is_on: whether it still watches.
        captures: whether this thread captures a CUDA graph: a mark of then shows no time.
        log: of the thread that trains; None before its first model, and once it is off.
        inline_s: seconds that it took of the thread that trains, so far.
    """

    def __init__(self, courier: RecordSender, *, loaders: Sequence[MadeLoader]) -> None:
        self.is_on = True
        self.captures: Callable[[], bool] = bool
        self.log: StepLog | None = None
        self.inline_s = 0.0
        self.courier = courier
        self._loaders = loaders
        self._kind = ""
        self._models: list[CallSite] = []
        self._reads: Callable[[], Any] = lambda: None
        self._read: list[Frames] = []  # of the loader that training reads, or of all it may be
        self._garbage = GarbageClock()
        self._compiling = CompileClock()

    def guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call for the thread that trains: a fault of the watch's own switches it off, no more."""
        if self.is_on and not self.captures():
            begin = perf_counter()
            try:
                call(*arguments)
            except Exception as error:
                self.switch_off(error)
            self.inline_s += perf_counter() - begin

    def model_made(self, kind: str, made: str, device: torch.device, frames: Frames) -> None:
        """Note that a model was wrapped, and begin to watch if it is the first."""
        self._kind = kind
        site = site_of(made, frames)
        is_layer = kind == "FSDP2" and any(one.made == made for one in self._models)
        if not is_layer and site not in self._models:
            self._models.append(site)
        if self.log is None:
            self._begin(device)
        if kind == "FSDP1" and self.log is not None:  # waits are inside of forward and backward
            self.log.mixes()

    def loader_read(self, iterator: Any) -> None:
        """Note what training reads, to know where the script made the loader.

        Both draw their indices from one object. A loader that is gone may be any that was made for
        the data set. What is read before the first step may be for something else; all that is
        read between two steps is for the second.
        """
        if self._reads() is iterator:
            return
        self._reads = weakref.ref(iterator)
        number, indices = id(dataset_of(iterator)), indices_of(iterator)
        may_be = [(made(), frames) for made, dataset, frames in self._loaders if dataset == number]
        own = [
            frames
            for loader, frames in may_be
            if indices is getattr(loader, "batch_sampler", None)
            or indices is getattr(loader, "sampler", None)
        ]
        found = own or [frames for _, frames in may_be] or self._read
        has_stepped = self.log is not None and self.log.num_stepped > 0
        self._read = [*self._read, *found] if has_stepped else found

    def close(self) -> None:
        """Send the last, and on rank 0 say what was seen."""
        if not self.is_on:
            return
        try:
            loaders = dict.fromkeys(site_of("DataLoader", frames) for frames in self._read)
            sites = (*self._models, *loaders)
            self.courier.close(
                self._kind, sites, own_s=lambda: self.inline_s + self.courier.thread_s
            )
            self._stop()
        except Exception as error:
            self.switch_off(error)

    def switch_off(self, error: BaseException) -> None:
        """Watch no more, say so in a line, and let the training continue."""
        if not self.is_on:
            return
        self._stop()
        say_off(self.courier.rank, error)

    def forget(self) -> None:
        """Watch no more, as in a process that was forked from one that trains."""
        self.is_on, self.log = False, None
        self._garbage.close()

    def _stop(self) -> None:
        self.is_on = False
        log, self.log = self.log, None
        self.courier.stop()
        with suppress(Exception):
            self._garbage.close()
            self._compiling.close()
            if log is not None:
                log.close()

    def _begin(self, device: torch.device) -> None:
        try:
            clock = clock_of(device)
        except ValueError as error:  # whose words are on a call that the script does not make
            raise RuntimeError(f"steps on {device} cannot be timed") from error
        self._garbage.open()
        is_cuda = device.type == "cuda"
        if is_cuda:
            self.captures = _captures
        self.log = StepLog(clock, counted_s=self._counted_s, guard=self.guard)
        self.courier.open(
            StepRecorder(self.log).take_records,
            describe_device(device),
            HostReader(alloc_retries=partial(alloc_retries, device)).read,
            on_fault=self.switch_off,
            prepare=ignore_captures if is_cuda else lambda: None,
        )

    def _counted_s(self) -> tuple[float, float]:
        self._compiling.listen()
        return self._garbage.total_s, self._compiling.total_s


def _captures() -> bool:
    """Return whether this thread captures a CUDA graph; also where the device does not say."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # it is broken, as the training's own next call will say
        return True


def ignore_captures() -> None:
    """Have this thread ask for events while another one captures a CUDA graph.

    Where a thread is left as it begins, asking makes that capture fail. This changes no other's.
    """
    thread_local = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with suppress(OSError, AttributeError):  # another's device than NVIDIA's
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(thread_local))
