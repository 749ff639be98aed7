"""What TensorFlow's own training thread is, to the exchange that carries reports and plans."""

from __future__ import annotations

import sys
import threading
from typing import final

from .._exchange._exchange import Exchange
from .._exchange._place import ENDED, Framework, Place, file_of, line_of_user
from .._planner import Plan, Report

_WAITING = "/tensorflow/python/eager/execute.py"  # where a call of a graph waits for its end


@final
class StepExchange:
    """One worker's steps, as the exchange knows them: one report and one collective in each.

    Step k always decides k + 1. Messages go over connections of their own, and never through
    TensorFlow's collectives: those have to be issued in the same order everywhere, and name
    no worker when one dies.

    Args:
        exchange: of this worker.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def report(self, report: Report) -> None:
        """Send this worker's one message for a step."""
        self._exchange.report(report.step, [report])

    def at(self, step: int) -> Plan:
        """Return the plan of ``step``, once it is decided: the plan point.

        Raises:
            WorkerLostError: a worker that is needed for it was lost.
        """
        plan = self._exchange.at(step)
        self._exchange.check()
        return plan

    def enter_collective(self, step: int) -> None:
        """Note that gradients of ``step`` are about to be summed over the workers.

        Raises:
            WorkerLostError: one of them was lost, or has ended its run before that step.
        """
        self._exchange.enter_collective()
        self._exchange.need_all(step)

    def leave_collective(self) -> None:
        """Note that no more are."""
        self._exchange.leave_collective()


def place_of(thread_id: int) -> Place:
    """Return where a thread is: never in a collective, as who is asked has not reported by then."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return ENDED
    return Place(line_of_user(frame), in_collective=False, compiling=False)


def is_in_tensorflow(thread_id: int) -> bool:
    """Tell whether a thread waits for a graph of TensorFlow's, with a collective in it perhaps."""
    frame = sys._current_frames().get(thread_id)
    return frame is not None and file_of(frame).endswith(_WAITING)


TENSORFLOW = Framework(
    place_of,
    is_in_tensorflow,
    "start all workers anew; `BackupAndRestore` goes on in `fit`",
    # Plans are asked for by a thread of TensorFlow's data sets.
    training_thread=lambda: threading.main_thread().ident or 0,
)
