"""Ranks once more, over gloo: for what is said outside of the steps, and among peers.

The star of connections is made through the side group of all ranks. Where there is no star yet, as
in ``prepare``, or none at all, as under ``EVENSTEP=off``, they send messages through it.

Ranks that hold parts of one copy of the model, as under tensor parallelism, get one batch for all:
they are peers. Balancing goes over the data-parallel ranks alone. Each tensor-parallel coordinate
has its own group of those, with an exchange of its own, and no two of them would decide alike. So
the groups of all coordinates but the first follow: their plans and orders are those of the peer at
the first.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ..._exchange._channel import VERSION, ProtocolError, check_versions
from ..._exchange._exchange import Exchange
from ..._planner import Plan
from ..._private_torch import process_groups
from ...exceptions import invalid

_VERSION_BYTES = 64  # in which each rank says which version it runs, in all versions
_VERDICT_S = 2.0
_Value = TypeVar("_Value")


class CollectiveWatch(Protocol):
    """Learns of lost workers while a thread waits in a collective."""

    def check(self) -> None:
        """Raise if a worker was lost."""

    def enter_collective(self) -> bool:
        """Note that the calling thread goes into a collective; return if it was in none."""

    def leave_collective(self) -> None:
        """Note that it is back."""

    def verdict(self, *, within_s: float) -> Exception | None:
        """Return the loss of a worker, if one becomes known in time."""


class Bracket:
    """Goes around a collective of the balancer's own: ``with bracket():``.

    A process that is stuck in there with a lost worker is ended, as in a backward; where the
    collective breaks, the error names the worker.

    Attributes:
        watch: learns of lost workers; None before a run is open, when none is lost.
    """

    def __init__(self) -> None:
        self.watch: CollectiveWatch | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Note for the time of the block that the calling thread is in a collective.

        Raises:
            WorkerLostError: a worker was lost, before or meanwhile.
        """
        watch = self.watch
        if watch is None:
            yield
            return
        watch.check()
        # A sharded model's is noted from its last forward to its backward's end.
        was_outside = watch.enter_collective()
        try:
            yield
        except RuntimeError as error:
            lost = watch.verdict(within_s=_VERDICT_S)
            if lost is None:
                raise
            raise lost from error
        finally:
            if was_outside:
                watch.leave_collective()


class PeerGroup:
    """The ranks with which this one shares each batch. Collective: all of them make it together.

    Args:
        ranks: their global ranks, the one that leads first; this one among them.
        bracket: goes around the collectives.
    """

    def __init__(self, ranks: list[int], bracket: Bracket) -> None:
        self.ranks = ranks
        self._bracket = bracket
        self.follows = dist.get_rank() != ranks[0]
        self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._changed = threading.Lock()
        self._news: list[Plan] = []
        self._listeners: list[Callable[[Plan], None]] = []

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` called with every plan of the leader's, on a rank that follows."""
        self._listeners.append(listener)

    def on_plan(self, plan: Plan) -> None:
        """On the leader: take note of a plan, from any thread."""
        with self._changed:
            self._news.append(plan)

    def agree(self, plan: Plan, exchange: Exchange) -> Plan:
        """Return the leader's plan, once the listeners got all up to it: the plan point.

        Args:
            plan: this rank's own.
            exchange: of this rank's balanced group: each knows only whether one of its own ranks
                was asked to stop. What any of the peers' groups knows, all do afterwards.
        """
        with self._changed:
            news = [new for new in self._news if new.epoch <= plan.epoch]
            self._news = [new for new in self._news if new.epoch > plan.epoch]
        said: list[Any] = [None] * len(self.ranks)
        with self._bracket():
            dist.all_gather_object(said, (exchange.stopping, news, plan), group=self._group)
        exchange.stopping = any(stopping for stopping, *_ in said)
        _, news, agreed = said[0]
        for new in news:
            for listener in tuple(self._listeners):
                listener(new)
        return agreed  # type: ignore[no-any-return]

    def share(self, value: _Value) -> _Value:
        """Return what the leader was called with."""
        box = [value]
        with self._bracket():
            dist.broadcast_object_list(box, src=self.ranks[0], group=self._group)
        return box[0]

    def close(self) -> None:
        """End the group's threads, unless the group was ended before."""
        if self._group in process_groups():
            dist.destroy_process_group(self._group)
        del self._group


def peers_of(module: nn.Module, balanced: set[int]) -> list[int]:
    """Return the ranks that share this one's batches, itself included; alone without a mesh.

    From the device meshes of the parameters: along a data-parallel dimension lie balanced ranks,
    along every other one none but this.

    Args:
        module: sharded by FSDP2 over the balanced ranks, some of its layers perhaps by
            ``parallelize_module`` too.
        balanced: global ranks among which batches are split.

    Raises:
        ValueError: a dimension of a mesh has some of the balanced ranks, which is neither.
    """
    found = [dist.get_rank()]
    for parameter in module.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        ranks = [int(rank) for rank in _across(mesh, balanced).flatten()]
        if len(ranks) > len(found):
            found = ranks
    return found


def _across(mesh: Any, balanced: set[int]) -> torch.Tensor:
    """Return the part of ``mesh`` in which this rank differs in no data-parallel coordinate."""
    part = mesh.mesh
    for dim, at in reversed(list(enumerate(mesh.get_coordinate()))):
        here = list(mesh.get_coordinate())
        here[dim] = slice(None)
        line = set(map(int, mesh.mesh[tuple(here)]))
        if line <= balanced:
            part = part.select(dim, at)
        elif len(line & balanced) > 1:
            raise invalid(
                "Balancer.prepare(model)",
                "have device meshes with all balanced ranks, or one of them, along each dimension",
                f"ranks {sorted(line)}, of which {sorted(line & balanced)} are balanced",
                "Give the whole data-parallel dimension to `Runtime(process_group=...)`.",
            )
    return part  # type: ignore[no-any-return]


def gloo_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a new group over gloo, of the ranks of another; None is the default group."""
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(process_group or dist.group.WORLD),
        backend="gloo",
        use_local_synchronization=process_group is not None,
    )
    return made


class SideGroup:
    """All ranks once more, over gloo: for the few things said outside of the steps.

    Collective: every rank of the default group makes it in the same order.

    Args:
        process_group: whose ranks; None is the default group.
        group: to send over, of the same ranks, its own from now on; None makes one.
        version: of evenstep and its protocol, on this rank.

    Raises:
        ProtocolError: ranks run different versions. On all of them, before any reads what another
            one wrote.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        group: dist.ProcessGroup | None = None,
        *,
        version: str = VERSION,
    ) -> None:
        self._group = group or gloo_group(process_group)
        ranks = dist.get_process_group_ranks(self._group)
        self.rank = dist.get_rank(self._group)
        self.world_size = len(ranks)
        self._first = ranks[0]
        self._ranks = set(ranks)
        self._pid = os.getpid()
        self._last: torch.Tensor | None = None
        self._bracket = Bracket()
        self.peers: PeerGroup | None = None
        atexit.register(self.close)  # for a balancer that never comes to its first step
        self._check_version(version)

    def _check_version(self, version: str) -> None:
        """Raise, on all ranks, if they run different versions."""
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
        """Return on every rank, and on its peers, the integers that rank 0 was called with."""
        agreed: list[int] = self.share(indices)
        return agreed if self.peers is None else self.peers.share(agreed)

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
        launched = os.environ.get("WORLD_SIZE", "")
        if launched.isdecimal() and int(launched) > 1:
            raise RuntimeError(
                f"A launcher started {launched} processes, and each would train "
                f"alone: call `torch.distributed.init_process_group()` before `prepare`."
            )
        return Alone()
    if dist.get_world_size(process_group) == 1:
        return Alone()
    return SideGroup(process_group, group)
