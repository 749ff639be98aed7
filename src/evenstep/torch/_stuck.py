"""A thread that waits in a collective for a lost peer: how to tell, and the only way out."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys


def is_in_collective(thread_id: int) -> bool:
    """Tell whether the thread's innermost Python code is a backward's or DDP's own.

    An error raised in there leaves no note that it is over, and its handler may be saving a
    checkpoint: that must not be ended.
    """
    frame = sys._current_frames().get(thread_id)
    where = frame.f_code.co_filename.replace(os.sep, "/") if frame is not None else ""
    return where.endswith(("torch/autograd/graph.py", "torch/nn/parallel/distributed.py"))


def end_process(message: str) -> None:
    """End the process from a side thread: the main one is stuck in a collective."""
    log = logging.getLogger("evenstep")
    log.critical("This process waits in vain and is ended, where it stood: %s", message)
    faulthandler.dump_traceback()
    logging.shutdown()
    os._exit(1)
