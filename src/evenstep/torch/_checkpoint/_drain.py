"""A notice to stop, such as that of a spot instance: one rank gets it, and all ranks follow."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any, Final, NoReturn, Self

from ...exceptions import invalid
from .._balancer import Balancer
from .._exchange._agent import end_agent

BEGIN_ANEW: Final = 75
"""Exit code of a worker that is to be started anew: EX_TEMPFAIL of sysexits.h."""


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

    ``Drain`` can also drop a worker that costs more than it brings (``WorkerUnhelpful``). All ranks
    save and leave the loop as after a notice, and the processes end at the end of the ``with``
    block, after the balancer is closed. The worker ends together with its torchrun, so its node
    leaves the run. The others end with exit code 75, so that their torchruns restart them without
    it. This needs one torchrun per worker, restarts left, and a ``--nnodes`` that allows one node
    less. Otherwise the worker is kept, and ``WorkerKept`` says why. It is also kept if another
    program runs between torchrun and the script, and on systems other than Linux, where torchrun
    cannot be recognized. Do not use it for a node that hosts the rendezvous store, without which
    the others cannot meet.

    Args:
        balancer: the balancer whose ranks agree.
        signals: the signals that are notices. torchrun passes SIGTERM on, and schedulers and
            clouds send it.
        drop_unhelpful: whether a worker that costs more than it brings is dropped.
        min_world_size: the fewest workers that may remain, at least 1: the minimum of ``--nnodes``.

    Raises:
        ValueError: ``signals`` is empty or holds what cannot be caught, or ``min_world_size`` is
            out of range.
    """

    def __init__(
        self,
        balancer: Balancer,
        *,
        signals: Iterable[signal.Signals] = (signal.SIGTERM,),
        drop_unhelpful: bool = False,
        min_world_size: int = 1,
    ) -> None:
        self._signals = tuple(signals)
        if not self._signals or {signal.SIGKILL, signal.SIGSTOP} & set(self._signals):
            raise invalid(
                "Drain(signals=...)",
                "name at least one signal, and only signals that can be caught",
                self._signals,
                "Leave it out for SIGTERM.",
            )
        if min_world_size < 1:
            raise invalid(
                "Drain(min_world_size=...)",
                "be at least 1",
                min_world_size,
                "Give the least number of nodes that torchrun's `--nnodes` allows.",
            )
        self._balancer, self._session = balancer, balancer._session
        self._session.least_workers = min_world_size if drop_unhelpful else None
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
        is_leaving = self._session.is_leaving
        if error is None and is_leaving is not None:
            self._begin_anew(is_leaving=is_leaving)

    def _begin_anew(self, *, is_leaving: bool) -> NoReturn:
        """End this process, for the others to be started without the worker that leaves."""
        if is_leaving:
            # Its torchrun sends the signal when it is ended below, and before that, if the others
            # meet while this process still closes: it ends by itself, in good order.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._balancer.close()
        if is_leaving:
            end_agent()
        raise SystemExit(0 if is_leaving else BEGIN_ANEW)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        service = self._balancer._parts.service
        heard = self._session.ask_to_stop() if service is None else service.ask_to_stop()
        self._give_back()
        if not heard:
            signal.raise_signal(number)  # to the handler that was there before

    def _give_back(self) -> None:
        """Restore what heard the signals before."""
        while self._former:
            number, handler = self._former.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
