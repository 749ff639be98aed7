"""Where a thread is, and how to tell that it waits for a lost peer."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_OURS = Path(__file__).parents[2].as_posix() + "/"
_STDLIB = Path(sysconfig.get_path("stdlib")).as_posix() + "/"
_COLLECTIVES = ("torch/autograd/graph.py", "torch/nn/parallel/distributed.py")
_ANYBODYS = "torch/distributed/distributed_c10d.py"
_FSDP = "/torch/distributed/fsdp/_fully_shard/"
_OWN = tuple(Path(__file__).with_name(name).as_posix() for name in ("_startup.py", "_peers.py"))
# Only what runs while something is compiled: other files of the compilers, such as `eval_frame.py`,
# are on the stack whenever a compiled model runs.
_COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/async_compile.py",
    "/torch/_inductor/compile_fx.py",
    "/triton/compiler/",
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thread is.

    Attributes:
        text: the innermost line of the user's own, for people.
        in_collective: whether it may be waiting for others: a backward, DDP, ``torch.distributed``.
            False is no proof: a wait for a work in flight has no Python frame of its own.
        compiling: whether it is inside a compiler of torch's.
        past_backward: whether it has ended a backward of the step that it was asked about. After
            one it may be waiting for anybody; before, all that it can wait for was done by those
            who have ended theirs.
    """

    text: str
    in_collective: bool
    compiling: bool
    past_backward: bool = False


def is_in_collective(thread_id: int) -> bool:
    """Tell whether the thread's innermost Python code is a backward's, DDP's, FSDP2's or our own.

    Our own are the balancer's collectives outside of the steps. An error raised in there leaves no
    note that it is over, and its handler may be saving a checkpoint: that must not be ended.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None or not _file(frame).endswith(_ANYBODYS):
        return frame is not None and _file(frame).endswith((*_COLLECTIVES, *_OWN))
    while frame is not None and _FSDP not in (file := _file(frame)) and file not in _OWN:
        frame = frame.f_back
    return frame is not None


def place_of(thread_id: int) -> Place:
    """Return where the thread is."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return Place("past its training thread's end", in_collective=False, compiling=False)
    innermost = _file(frame)
    compiling, text = False, ""
    while frame is not None:
        file = _file(frame)
        compiling |= any(part in file for part in _COMPILERS)
        if not text and not _is_machinery(file):
            text = f"at {file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    waits = innermost.endswith((*_COLLECTIVES, *_OWN)) or "/torch/distributed/" in innermost
    return Place(text or f"in {innermost}", waits, compiling)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace(os.sep, "/")


def _is_machinery(file: str) -> bool:
    """Tell whether a file belongs to Python, torch or us, and not to the user."""
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return installed or file.startswith(("<frozen", _OURS, _STDLIB))
