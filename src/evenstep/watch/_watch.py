"""One rank's watch: what the patches report, a thread that sends it, and its end."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import torch

from .._diagnosis import Phase
from .._host import GarbageClock, HostReader
from .._private_torch import dataset_of, indices_of
from .._torch_clock import CompileClock, alloc_retries, clock_of, describe_device
from ._courier import RecordSender
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
        log: of the thread that trains; None before its first model, and once it is off.
    """

    def __init__(self, courier: RecordSender, *, loaders: Sequence[MadeLoader]) -> None:
        self.log: StepLog | None = None
        self.courier = courier
        courier.on_stop = self._stop
        self._loaders = loaders
        self._kind = ""
        self._models: list[CallSite] = []
        self._reads: Callable[[], Any] = lambda: None
        self._read: list[Frames] = []  # of the loader that training reads, or of all it may be
        self._garbage = GarbageClock()
        self._compiling = CompileClock()

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
        loaders = dict.fromkeys(site_of("DataLoader", frames) for frames in self._read)
        self.courier.close(self._kind, (*self._models, *loaders))

    def forget(self) -> None:
        """Watch no more, as in a process that was forked from one that trains."""
        self.courier.is_on, self.log = False, None
        self._garbage.close()

    def _stop(self) -> None:
        log, self.log = self.log, None
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
            self.courier.captures = _captures
        self.log = log = StepLog(clock, counted_s=self._counted_s, guard=self.courier.guard)
        recorder = StepRecorder(log, self.courier.records.append)
        self.courier.open(
            describe_device(device),
            HostReader(alloc_retries=partial(alloc_retries, device)).read,
            catch_up=recorder.catch_up,
            prepare=ignore_captures if is_cuda else lambda: None,
            phase=lambda: Phase.MEETING if log.meets else recorder.phase,
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
