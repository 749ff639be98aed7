"""Where a thread is, which collectives it has come to, and how it comes out of one."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

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
from ..._host import connections
from ..._private_torch import backends_of, default_store, process_groups


def own_addresses() -> list[str]:
    """Return the addresses at which this process is connected: ranks reach each other by them."""
    return sorted({connection.here for connection in connections()})


def break_off(addresses: Collection[str], *, spared_ports: Collection[int]) -> int:
    """Shut down the connections to other ranks that no socket object of Python's stands for.

    Gloo waits half an hour for a peer that was stopped, and its ``abort()`` wakes no thread. This
    does, at once, wherever the thread is: inside an all-reduce, a barrier of the user's, a backward
    hook. The collective raises, and the script continues to its own ``finally``.

    Nothing in torch says which connections are gloo's, so they are found by where they lead. A
    connection of the user's own that leads there too would be broken off as well; that is done only
    to end a run in which a rank was lost. Ray's connections are of that kind, and carry what its
    workers raise: inside of Ray nothing is broken off.

    Args:
        addresses: of all ranks.
        spared_ports: connections from or to these stay, such as the store's.

    Returns:
        How many there were.
    """
    if "ray" in sys.modules:
        return 0
    spared, known = frozenset(spared_ports), _descriptors_of_python()
    count = 0
    for one in connections():
        if one.there in addresses and one.descriptor not in known and spared.isdisjoint(one.ports):
            with suppress(OSError), socket.socket(fileno=os.dup(one.descriptor)) as again:
                again.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def ports_of_store() -> set[int]:
    """Return the ports of the store by which the process group was made, as far as known."""
    ports = {int(port)} if (port := os.environ.get("MASTER_PORT", "")).isdigit() else set()
    store: Any = default_store() if dist.is_initialized() else None
    while store is not None and not hasattr(store, "port"):
        store = getattr(store, "underlying_store", None)  # behind prefixes
    return ports if store is None else ports | {int(store.port)}


def _descriptors_of_python() -> set[int]:
    found = set()
    for one in gc.get_objects():
        if issubclass(type(one), socket.socket):  # `isinstance` would ask objects for their class
            with suppress(OSError):
                found.add(one.fileno())
    return found


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
        f"{name} group {group.group_name} ({_newest_of(group)})": count
        for group in process_groups()
        for name, count in backends_of(group)
    }


def _newest_of(group: dist.ProcessGroup) -> str:
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
