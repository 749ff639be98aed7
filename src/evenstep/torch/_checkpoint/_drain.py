"""A notice to stop, such as that of a spot instance: one rank gets it, and all ranks follow."""

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
        service = self._balancer._parts.service
        heard = self._session.ask_to_stop() if service is None else service.ask_to_stop()
        self._give_back()
        if not heard:
            signal.raise_signal(number)  # to the handler that was there before

    def _give_back(self) -> None:
        """Restore the former handlers of the signals."""
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
