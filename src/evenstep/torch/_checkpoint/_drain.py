"""A notice to stop, such as that of a spot instance, heard by one rank and followed by all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Self

from ...exceptions import invalid
from .._balancer import Balancer


class Drain:
    """Turns SIGTERM on any rank into one decision of all: stop after this very step.

    Usage:
        with Drain(balancer) as drain:
            for x, y in loader:
                ...
                if drain.requested:
                    checkpoint.save(step)
                    break

    The word travels with the messages of the steps, so it costs nothing while nobody is told to
    stop. A rank that is told in step $k$ makes ``requested`` true on all ranks in step $k + 1$
    ($k + 2$ on CUDA), from the moment on at which the loop is handed that step's batch: all save
    the same step, leave the loop together, and end with exit code 0.

    Right where the time from notice to end is several steps long. A process that has not begun
    its first step has nothing to save, and ends as without a drain; so does one that was told
    when another worker is lost, since torchrun ends the survivors in this way before a restart. A
    second signal does what the first would have done, too.

    Args:
        balancer: the balancer whose ranks agree.
        signals: what counts as a notice. SIGTERM is what torchrun passes on, and schedulers and
            clouds send.

    Raises:
        ValueError: ``signals`` is empty or holds what cannot be caught.
    """

    def __init__(
        self, balancer: Balancer, *, signals: Iterable[signal.Signals] = (signal.SIGTERM,)
    ) -> None:
        self._signals = tuple(signals)
        if not self._signals or {signal.SIGKILL, signal.SIGSTOP} & set(self._signals):
            raise invalid(
                "Drain(signals=...)",
                "name at least one signal, and only such as can be caught",
                self._signals,
                "Leave it out for SIGTERM.",
            )
        self._link = balancer._link
        self._former: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether to stop after the step under way: the same on all ranks.

        Stays true once it is, also after the loop.
        """
        return self._link.stopping

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Python hears signals in the main thread only: enter `Drain` there.")
        for number in self._signals:
            self._former[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._give_back()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        heard = self._link.ask_to_stop()
        self._give_back()
        if not heard:
            signal.raise_signal(number)  # to whoever heard it before

    def _give_back(self) -> None:
        """Restore what heard the signals before."""
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
