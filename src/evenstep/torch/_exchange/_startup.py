"""Once at the start: who runs where, the side group, the star of connections."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from ..._exchange._meeting import loopback
from ..._exchange._threads import network_name
from ..._exchange._wire import VERSION, ProtocolError, check_versions
from ..._private_torch import process_groups
from ..._run._open_channel import AllRanks
from ._bracket import Bracket, CollectiveWatch
from ._peers import PeerGroup, peers_of
from ._sockets import own_addresses

_VERSION_BYTES = 64  # in which each rank says which version it runs, in all versions


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


class SideGroup:
    """All ranks once more, over gloo: for the few things said outside of the steps.

    Args:
        group: to send over, its own from now on; `open` makes one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.world_size = len(ranks)
        self._first = ranks[0]
        self._ranks = set(ranks)
        self._group = group
        self._pid = os.getpid()
        self._last: torch.Tensor | None = None
        self._bracket = Bracket()
        self.peers: PeerGroup | None = None

    @classmethod
    def open(
        cls,
        process_group: dist.ProcessGroup | None,
        group: dist.ProcessGroup | None = None,
        *,
        version: str = VERSION,
    ) -> Self:
        """Return the side group of all ranks of a process group.

        Collective: every rank of the default group opens it in the same order.

        Args:
            process_group: whose ranks; None is the default group.
            group: to send over, of the same ranks; None makes one.
            version: of evenstep and its protocol, on this rank.

        Raises:
            ProtocolError: ranks run unlike versions. On all of them, before any reads what
                another one wrote.
        """
        side = cls(
            group
            or dist.new_group(
                dist.get_process_group_ranks(process_group or dist.group.WORLD),
                backend="gloo",
                use_local_synchronization=process_group is not None,
            )
        )
        atexit.register(side.close)  # for a balancer that never comes to its first step
        side._check_version(version)
        return side

    def _check_version(self, version: str) -> None:
        """Raise, on all ranks, if they run unlike versions."""
        # Until all are connected: one that refuses its part and leaves at once would break the
        # others' way in, with an error of gloo's in the place of their own.
        texts = torch.zeros(self.world_size, _VERSION_BYTES, dtype=torch.uint8)
        mine = version.encode()[:_VERSION_BYTES]
        texts[self.rank, : len(mine)] = torch.tensor(list(mine), dtype=torch.uint8)
        try:
            found = [bytes(row).rstrip(b"\0").decode() for row in self.sum(texts).tolist()]
            check_versions(dict(enumerate(found)))
        except ProtocolError:
            self.close()
            raise

    def join(self, module: nn.Module) -> None:
        """Share every batch with the ranks that hold other parts of ``module``, if any do.

        Collective over those.
        """
        ranks = peers_of(module, self._ranks)
        if len(ranks) > 1 and self.peers is None:
            self.peers = PeerGroup(ranks, self._bracket)

    def watch_by(self, watch: CollectiveWatch) -> None:
        """Have the loss of a worker noticed in all that follows."""
        self._bracket.watch = watch

    def close(self) -> None:
        """End the group's threads, unless the script has ended the group before.

        A thread of gloo's may hold the last reference to a tensor that Python knows. If it lets go
        while Python shuts down, the process aborts: so the threads end here, and until then the
        newest tensor is kept. A forked child has none of them.
        """
        if self._pid != os.getpid():
            return
        atexit.unregister(self.close)
        if self._group in process_groups():
            dist.destroy_process_group(self._group)
        del self._group
        self._last = None
        if self.peers is not None:
            self.peers.close()

    def share(self, value: Any) -> Any:
        """Return on every rank what rank 0 was called with."""
        box = [value]
        with self._bracket():
            dist.broadcast_object_list(box, src=self._first, group=self._group)
        return box[0]

    def share_indices(self, indices: list[int] | None) -> list[int]:
        """Return on every rank the integers that rank 0 was called with: a tensor, not objects."""
        count = torch.tensor([len(indices) if indices is not None else 0])
        with self._bracket():
            dist.broadcast(count, src=self._first, group=self._group)
            values = torch.zeros(int(count), dtype=torch.int64)
            if indices is not None:
                values = torch.tensor(indices, dtype=torch.int64)
            dist.broadcast(values, src=self._first, group=self._group)
        self._last = values
        agreed = list(map(int, values.tolist()))
        return agreed if self.peers is None else self.peers.share_indices(agreed)

    def collect(self, value: Any) -> list[Any]:
        """Return on every rank what each rank was called with, in order."""
        values: list[Any] = [None] * self.world_size
        with self._bracket():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a CPU tensor."""
        with self._bracket():
            dist.all_reduce(values, group=self._group)
        self._last = values
        return values


class Alone:
    """The side group of a single process."""

    rank = 0
    world_size = 1
    peers = None

    def join(self, module: nn.Module) -> None:
        """Do nothing: a single rank shares its batches with no other."""

    def watch_by(self, watch: CollectiveWatch) -> None:
        """Do nothing: there is no other worker to lose."""

    def close(self) -> None:
        """Do nothing."""

    def share(self, value: Any) -> Any:
        """Return ``value``."""
        return value

    def share_indices(self, indices: list[int] | None) -> list[int]:
        """Return ``indices``."""
        return indices or []

    def collect(self, value: Any) -> list[Any]:
        """Return ``value`` alone."""
        return [value]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values``."""
        return values


def open_side(
    process_group: dist.ProcessGroup | None, group: dist.ProcessGroup | None = None
) -> SideGroup | Alone:
    """Return the side group, or its stand-in without a process group or with one process.

    Args:
        process_group: whose ranks; None is the default group.
        group: of the same ranks, to send over; None makes one.

    Raises:
        RuntimeError: a launcher started several processes, which do not know of each other yet.
    """
    if not (dist.is_available() and dist.is_initialized()):
        told = os.environ.get("WORLD_SIZE", "")
        if told.isdecimal() and int(told) > 1:
            raise RuntimeError(
                f"A launcher started {told} processes, and each would train "
                f"alone: call `torch.distributed.init_process_group()` before `prepare`."
            )
        return Alone()
    if dist.get_world_size(process_group) == 1:
        return Alone()
    return SideGroup.open(process_group, group)


def gather_facts(ranks: AllRanks, mine: WorkerFacts) -> list[WorkerFacts]:
    """Return the facts of all ranks, in order."""
    return [WorkerFacts(*row) for row in ranks.collect(astuple(mine))]


def describe_device(device: torch.device) -> str:
    """Return the device with its model's name, where it has one."""
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


def _identity(device: torch.device) -> str:
    """Return a name of the device that no other on its host has, where it can be told."""
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
