"""Once at the start: who has come, who runs where, by which addresses rank 0 is reached."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol

import torch
import torch.distributed as dist

from ..._exchange._meeting import loopback
from ..._exchange._threads import network_name
from ..._private_torch import default_store
from ..._run._runtime import AllRanks
from ..._torch_clock import describe_device
from ...exceptions import WorkerLostError
from ._stuck import own_addresses

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25  # between two questions to the store
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class Store(Protocol):
    """As torch's."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, 0 at first, and return it."""


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
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    if len(ranks) == 1:
        return
    group = dist.group.WORLD if process_group is None else process_group
    assert group is not None
    call = RollCall(
        default_store(),
        f"evenstep/{group.group_name}",
        num_ranks=len(ranks),
        rank=dist.get_rank(process_group),
        numbers=ranks,
    )
    call.wait(limit_s)


class RollCall:
    """One roll call.

    Args:
        store: that all ranks share.
        prefix: of its keys; the same on all ranks, and no other's.
        num_ranks: how many have to come.
        rank: of them, this process.
        numbers: the rank that each has among all processes; None is the same.
        environment: says whether torchrun hosts the store.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        *,
        num_ranks: int,
        rank: int,
        numbers: Sequence[int] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._store, self._prefix = store, prefix
        self._num_ranks, self._rank = num_ranks, rank
        self._numbers = range(num_ranks) if numbers is None else numbers
        self._is_agents = environment.get(_AGENTS_STORE) == "True"

    def wait(self, limit_s: float) -> None:
        """Wait until all have come.

        Raises:
            WorkerLostError: as in ``roll_call``.
        """
        # In a thread, since no call of the store's comes back once its host was stopped.
        answers: SimpleQueue[list[int] | Exception] = SimpleQueue()
        asking = threading.Thread(
            target=_answer, args=(answers, lambda: self._missing(limit_s)), daemon=True
        )
        asking.start()
        try:
            most_s = None if math.isinf(limit_s) else limit_s + 2 * _LONGEST_PAUSE_S
            found = answers.get(timeout=most_s)
        except Empty:
            found = TimeoutError(f"no answer within {limit_s:g} s")
        if isinstance(found, Exception):
            raise self._broken(found) from found
        if found:
            raise self._lost(found, limit_s)

    def _missing(self, limit_s: float) -> list[int]:
        """Come, and return who has not within the limit."""
        number = self._store.add(f"{self._prefix}/{self._rank}", 1)  # of this roll call
        arrived = f"{self._prefix}/{number}/arrived"
        count, pause_s, until_s = self._store.add(arrived, 1), _FIRST_PAUSE_S, monotonic() + limit_s
        waiting = threading.Event()
        while count < self._num_ranks and monotonic() < until_s:
            waiting.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            count = self._store.add(arrived, 0)
        if count >= self._num_ranks:
            return []
        came = [self._store.add(f"{self._prefix}/{rank}", 0) for rank in range(self._num_ranks)]
        return [rank for rank, times in enumerate(came) if times < number]

    def _broken(self, error: Exception) -> Exception:
        if self._is_agents:
            return RuntimeError(f"The store of the process group, torchrun's, broke: {error}")
        return WorkerLostError(
            0,
            "Rank 0 was lost before all ranks reached `Balancer.prepare`: the process group's "
            f"store, which it hosts, broke or stopped answering ({error}).",
        )

    def _lost(self, missing: list[int], limit_s: float) -> WorkerLostError:
        names = ", ".join(map(self._name, missing))
        which = f"Rank {names} was" if len(missing) == 1 else f"Ranks {names} were"
        return WorkerLostError(
            missing[0],
            f"{which} lost: it did not reach `Balancer.prepare` within {limit_s:g} s of this rank "
            "(if it was only slow, raise `Runtime(hang_s=...)`, or call "
            "`torch.distributed.barrier()` first).",
        )

    def _name(self, rank: int) -> str:
        number = self._numbers[rank]
        return f"{rank}" if number == rank else f"{rank} (rank {number} of all)"


def _answer(answers: SimpleQueue[list[int] | Exception], ask: Callable[[], list[int]]) -> None:
    try:
        answers.put(ask())
    except Exception as error:  # of the store's
        answers.put(error)


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
