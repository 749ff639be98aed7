"""What TensorFlow's own training thread is, to the exchange that carries reports and plans."""

from __future__ import annotations

import threading

from .._exchange._place import ENDED, Framework, Place, file_of, frame_of, line_of_user

_WAITING = "/tensorflow/python/eager/execute.py"  # where a call of a graph waits for its end


def _place_of(thread_id: int) -> Place:
    """Return where a thread is: never in a collective, as who is asked has not reported by then."""
    frame = frame_of(thread_id)
    if frame is None:
        return ENDED
    return Place(line_of_user(frame), in_collective=False, compiling=False)


def _is_in_tensorflow(thread_id: int) -> bool:
    """Tell whether a thread waits for a graph of TensorFlow's, with a collective in it perhaps."""
    frame = frame_of(thread_id)
    return frame is not None and file_of(frame).endswith(_WAITING)


TENSORFLOW = Framework(
    _place_of,
    _is_in_tensorflow,
    "start all workers anew; `BackupAndRestore` goes on in `fit`",
    # Plans are asked for by a thread of TensorFlow's data sets.
    training_thread=lambda: threading.main_thread().ident or 0,
)
