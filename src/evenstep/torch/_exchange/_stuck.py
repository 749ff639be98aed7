"""Where a thread is, and which collectives it has come to: who waits for whom."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from ..._exchange._message_kinds import ENDED, ThreadLocation
from ..._exchange._threads import (
    Framework,
    awaits_message,
    file_of,
    frame_of,
    frames,
    frames_below_user,
    line_of_user,
)
from ..._exchange._world_check import listed
from ..._private_torch import backends_of, process_groups

_COLLECTIVES = ("torch/autograd/graph.py", "torch/nn/parallel/distributed.py")
_ANYBODYS = "torch/distributed/distributed_c10d.py"
_FSDP = "/torch/distributed/fsdp/_fully_shard/"
_UNNAMED = "undefined"  # how torch describes a group whose maker does not
_OWN = Path(__file__).with_name("_side_group.py").as_posix()
# Only what runs while something is compiled: other files of the compilers, such as `eval_frame.py`,
# are on the stack whenever a compiled model runs.
_COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/async_compile.py",
    "/torch/_inductor/compile_fx.py",
    "/triton/compiler/",
)


def is_in_collective(thread_id: int) -> bool:
    """Return whether the thread's innermost Python code is a backward's, DDP's, FSDP2's or our own.

    Our own are the balancer's collectives outside of the steps. An error raised in there leaves no
    note that it is over, and its handler may be saving a checkpoint: that must not be ended.
    """
    frame = frame_of(thread_id)
    if frame is None or not file_of(frame).endswith(_ANYBODYS):
        return frame is not None and file_of(frame).endswith((*_COLLECTIVES, _OWN))
    while frame is not None and _FSDP not in (file := file_of(frame)) and file != _OWN:
        frame = frame.f_back
    return frame is not None


def place_of(thread_id: int) -> ThreadLocation:
    """Return where the thread is."""
    frame = frame_of(thread_id)
    if frame is None:
        return ENDED
    compiling = any(part in file_of(each) for each in frames(frame) for part in _COMPILERS)
    waits = file_of(frame).endswith((*_COLLECTIVES, _OWN)) or any(
        "/torch/distributed/" in file_of(each) for each in frames_below_user(frame)
    )
    return ThreadLocation(line_of_user(frame), waits, compiling, awaits_message(frame))


def num_collectives() -> dict[str, int]:
    """Return how many collectives this process has begun in each of its process groups.

    Both gloo and NCCL count them as they are launched, so that one who waits in the last of them
    has counted it. Gloo counts a send or a receive as well.
    """
    return {
        f"{name} group {group.group_name} ({_told_of(group)})": count
        for group in process_groups()
        for name, count in backends_of(group)
    }


def _told_of(group: dist.ProcessGroup) -> str:
    """Return what a person may know a group by: what its maker calls it, or else its ranks."""
    if group.group_desc not in ("", _UNNAMED):
        return group.group_desc
    return listed(sorted(dist.get_process_group_ranks(group)))


TORCH = Framework(
    place_of,
    is_in_collective,
    "torchrun does with `--max-restarts`, Ray Train with `max_failures`",
    num_collectives=num_collectives,
)
