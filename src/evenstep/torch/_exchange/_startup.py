"""Who has come, and where; where a rank's thread is, and its collectives; a way out of one."""

from __future__ import annotations

import gc
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ..._exchange._meeting import loopback
from ..._exchange._message_kinds import ENDED, ThreadLocation
from ..._exchange._threads import (
    Framework,
    awaits_message,
    file_of,
    frame_of,
    frames,
    frames_below_user,
    line_of_user,
    network_name,
)
from ..._exchange._world_check import listed
from ..._host import connections
from ..._private_torch import backends_of, default_store, process_groups
from ..._run._runtime import AllRanks
from ..._torch_clock import describe_device
from ...exceptions import WorkerLostError


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


_BACKWARD, _DDP = "torch/autograd/graph.py", "torch/nn/parallel/distributed.py"
_ANYBODYS = "torch/distributed/distributed_c10d.py"
_DISTRIBUTED = "/torch/distributed/"
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
        return frame is not None and file_of(frame).endswith((_BACKWARD, _DDP, _OWN))
    while frame is not None and _FSDP not in (file := file_of(frame)) and file != _OWN:
        frame = frame.f_back
    return frame is not None


def place_of(thread_id: int) -> ThreadLocation:
    """Return where the thread is."""
    frame = frame_of(thread_id)
    if frame is None:
        return ENDED
    compiling = any(part in file_of(each) for each in frames(frame) for part in _COMPILERS)
    below = list(frames_below_user(frame))
    waits = file_of(frame).endswith((_BACKWARD, _DDP, _OWN)) or any(
        _DISTRIBUTED in file_of(each) for each in below
    )
    text, asks = line_of_user(frame), awaits_message(frame)
    return ThreadLocation(text, waits, compiling, asks, _call_of(frame, below))


def _call_of(frame: FrameType, below: Sequence[FrameType]) -> str:
    """Return which of torch's collectives the user's own line waits in, if it is one of them.

    Those of FSDP2 run ahead of each other, and have no name here.
    """
    if file_of(frame).endswith(_BACKWARD):
        return "backward"
    if not below or Path(file_of(below[-1])).parent.name != "distributed":
        return ""
    names = (each.f_code.co_name for each in below if file_of(each).endswith(_ANYBODYS))
    return next(names, "")


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


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25  # between two questions to the store
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def roll_call(process_group: dist.ProcessGroup | None, limit_s: float | None) -> None:
    """Wait until all ranks of a process group have come to this call. Collective.

    Making a process group waits for half an hour for a rank that never comes, and names none. The
    store by which the default group was made shows who is missing.

    Args:
        process_group: whose ranks; None is the default group. Nothing is done without a group.
        limit_s: seconds after which those that are missing count as lost; None is any time, and
            leaves the wait to torch.

    Raises:
        WorkerLostError: a rank did not come in time, or the store broke or fell silent, which rank
            0 hosts unless torchrun does.
    """
    if limit_s is None or not (dist.is_available() and dist.is_initialized()):
        return
    group = process_group or dist.group.WORLD
    assert group is not None
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return
    prefix, rank = f"evenstep/{group.group_name}", dist.get_rank(process_group)
    await_all(default_store(), prefix, rank, ranks, limit_s)


def await_all(store: Any, prefix: str, rank: int, numbers: Sequence[int], limit_s: float) -> None:
    """Wait until all of some ranks have come to this call.

    Args:
        store: of torch, that they share.
        prefix: of its keys; the same on all ranks, and no other's.
        rank: of them, this process.
        numbers: the rank that each has among all processes.
        limit_s: seconds after which those that are missing count as lost.

    Raises:
        WorkerLostError: as in ``roll_call``.
    """
    # In a thread, since no call of the store's comes back once its host was stopped.
    answers: SimpleQueue[list[int] | Exception] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(_missing(store, prefix, rank, len(numbers), limit_s))
        except Exception as error:  # of the store's
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        most_s = None if math.isinf(limit_s) else limit_s + 2 * _LONGEST_PAUSE_S
        found = answers.get(timeout=most_s)
    except Empty:
        found = TimeoutError(f"no answer within {limit_s:g} s")
    if isinstance(found, Exception):
        raise _broken(found) from found
    if found:
        names = [f"{at}" + f" (rank {numbers[at]} of all)" * (at != numbers[at]) for at in found]
        which = f"Rank {names[0]} was" if len(names) == 1 else f"Ranks {', '.join(names)} were"
        raise WorkerLostError(
            found[0],
            f"{which} lost: it did not reach `Balancer.prepare` within {limit_s:g} s of this rank "
            "(if it was only slow, raise `Runtime(hang_s=...)`, or call "
            "`torch.distributed.barrier()` first).",
        )


def _missing(store: Any, prefix: str, rank: int, num_ranks: int, limit_s: float) -> list[int]:
    """Come, and return who has not within the limit."""
    number = store.add(f"{prefix}/{rank}", 1)  # of this roll call
    arrived = f"{prefix}/{number}/arrived"
    count, pause_s, until_s = store.add(arrived, 1), _FIRST_PAUSE_S, monotonic() + limit_s
    waiting = threading.Event()
    while count < num_ranks and monotonic() < until_s:
        waiting.wait(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        count = store.add(arrived, 0)
    if count >= num_ranks:
        return []
    came = [store.add(f"{prefix}/{each}", 0) for each in range(num_ranks)]
    return [each for each, times in enumerate(came) if times < number]


def _broken(error: Exception) -> Exception:
    if os.environ.get(_AGENTS_STORE) == "True":
        return RuntimeError(f"The store of the process group, torchrun's, broke: {error}")
    return WorkerLostError(
        0,
        "Rank 0 was lost before all ranks reached `Balancer.prepare`: the process group's "
        f"store, which it hosts, broke or stopped answering ({error}).",
    )


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the others should know about a worker.

    Attributes:
        host: its host name.
        device: its device, such as ``"cpu"`` or ``"cuda:0 NVIDIA H200"``.
        lag: steps by which its measurements trail, 0 or 1.
        identity: host and device, as they go by through restarts: ranks are renumbered, and every
            process may call its own card ``"cuda:0"``.
        addresses: at which it is connected to other ranks.
        network: equal for those that reach each other by the loopback.
    """

    host: str
    device: str
    lag: int
    identity: str
    addresses: tuple[str, ...] = ()
    network: str = ""

    @classmethod
    def here(cls, device: torch.device, *, lag: int) -> WorkerFacts:
        """Return the facts of this process."""
        host = socket.gethostname()
        identity = f"{host} {_identity(device)}"
        addresses = tuple(own_addresses())
        return cls(
            host,
            describe_device(device),
            lag,
            identity,
            addresses=addresses,
            network=network_name(),
        )


def gather_facts(ranks: AllRanks, mine: WorkerFacts) -> list[WorkerFacts]:
    """Return the facts of all ranks, in order."""
    return [WorkerFacts(*row) for row in ranks.collect(astuple(mine))]


def _identity(device: torch.device) -> str:
    """Return a name of the device that no other on its host has, where one is known."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_properties(device).uuid}"
    return device.type


def addresses_of(facts: list[WorkerFacts]) -> list[str]:
    """Return addresses of this host, or one of its interfaces, best first.

    ``GLOO_SOCKET_IFNAME`` names the interfaces that gloo connects by, with commas in between; this
    one connection goes by the first. ``MASTER_ADDR`` is set by every launcher to a name of rank
    0's host that all can resolve.
    """
    if len({worker.network for worker in facts}) == 1:
        return [loopback()]
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip():
        return [interface]
    name = socket.gethostname()
    found = [os.environ.get("MASTER_ADDR", ""), *_quietly(lambda: [socket.getfqdn(), name])]
    found += _quietly(lambda: socket.gethostbyname_ex(name)[2])
    return list(dict.fromkeys(address for address in found if address))


def _quietly(resolve: Callable[[], list[str]]) -> list[str]:
    try:
        return resolve()
    except OSError:
        return []  # a host that cannot resolve its own name has others still
