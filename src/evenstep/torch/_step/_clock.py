"""Marks on the host or on a device, and the seconds between two of them."""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, final

import torch

from ...exceptions import invalid


class AbstractClock(abc.ABC):
    """Sets marks, and tells the seconds between two of them once both have been reached.

    Attributes:
        mark: returns a mark for "when everything asked for so far is done". A step sets ten.
        is_late: whether a mark is reached later than it is set, so that a device is asked.
    """

    mark: Callable[[], Any]
    is_late: bool

    @abc.abstractmethod
    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the seconds from one mark to another; None while one of them is not reached."""

    @abc.abstractmethod
    def wait(self, mark: Any) -> None:
        """Block until ``mark`` is reached."""


@final
class HostClock(AbstractClock):
    """For work that is done when the call returns: CPU tensors.

    Args:
        now: a monotonic clock in seconds.
    """

    is_late = False

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self.mark = now

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin

    def wait(self, mark: float) -> None:
        """Return at once: a mark on the host lies in the past."""


def _recorded(device: torch.device) -> Any:
    """Return an event that times, recorded on the current stream of ``device``."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event
    other = torch.Event(device, enable_timing=True)
    other.record(torch.accelerator.current_stream(device))
    return other


@final
class AcceleratorClock(AbstractClock):
    """For work queued on a device: events on the current stream, read without waiting.

    A wall clock around kernels measures their launch. An event is reached when the device gets
    there, and ``query`` asks without a synchronisation, so the host keeps running ahead; the
    price is that a step's time is often known one plan point later (``Exchange``).

    Args:
        device: the accelerator whose current stream is marked.
        record: returns an event that times, recorded on that stream.

    Raises:
        ValueError: the device has no events, or none that time.
    """

    is_late = True

    def __init__(
        self, device: torch.device, record: Callable[[torch.device], Any] = _recorded
    ) -> None:
        self.mark = partial(record, device)
        try:
            begin, end = self.mark(), self.mark()
            self.wait(end)
            self.seconds(begin, end)
        except (RuntimeError, NotImplementedError) as error:
            raise invalid(
                "Balancer.prepare(model)",
                "compute on a CPU, on CUDA, or on a device whose events torch can time",
                f"{device}: {error}",
                "A clock on the host would time when work is handed over, not when it is done. "
                "Train there with `EVENSTEP=off` in the environment.",
            ) from error

    def seconds(self, begin: Any, end: Any) -> float | None:
        # Both: of marks on two streams, the later one may be reached first.
        are_reached = end.query() and begin.query()
        return float(begin.elapsed_time(end)) / 1e3 if are_reached else None

    def wait(self, mark: Any) -> None:
        mark.synchronize()


def clock_of(device: torch.device) -> AbstractClock:
    """Return what times work on ``device``.

    Raises:
        ValueError: nothing does.
    """
    return HostClock() if device.type == "cpu" else AcceleratorClock(device)
