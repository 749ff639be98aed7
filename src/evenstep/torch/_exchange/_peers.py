"""Ranks that hold parts of one copy of the model, as under tensor parallelism: one batch for all.

Balancing goes over the data-parallel ranks alone. Each tensor-parallel coordinate has its own
group of those, with an exchange of its own, and no two of them would decide alike. So the groups
of all coordinates but the first follow: their plans and orders are those of the peer at the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..._planner import Plan
from ..._private_torch import process_groups
from ...exceptions import invalid
from ._bracket import Bracket


class Notice(Protocol):
    """Says whether a rank was told to stop.

    Attributes:
        stopping: as of the newest plan point.
    """

    stopping: bool


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
        self._last: torch.Tensor | None = None
        self._flag: torch.Tensor | None = None

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """On a rank that follows: have ``listener`` told of every plan of the leader's."""
        self._listeners.append(listener)

    def hear(self, plan: Plan) -> None:
        """On the leader: take note of a plan, from any thread."""
        with self._changed:
            self._news.append(plan)

    def agree(self, plan: Plan, notice: Notice) -> Plan:
        """Return the leader's plan, once the listeners heard of all up to it: the plan point.

        Args:
            plan: this rank's own.
            notice: what this rank's balanced group knows, each group of its own ranks alone. A
                notice to any of the peers' groups becomes one to all.
        """
        flag = torch.tensor([int(notice.stopping)])
        with self._bracket():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        notice.stopping = bool(flag.item())
        self._flag = flag  # a thread of gloo's may hold it last
        told: list[Any] = [None]
        if not self.follows:
            with self._changed:
                news = [new for new in self._news if new.epoch <= plan.epoch]
                self._news = [new for new in self._news if new.epoch > plan.epoch]
            told = [(news, plan)]
        with self._bracket():
            dist.broadcast_object_list(told, src=self.ranks[0], group=self._group)
        news, agreed = told[0]
        for new in news:
            for listener in tuple(self._listeners):
                listener(new)
        return agreed  # type: ignore[no-any-return]

    def share_indices(self, indices: list[int]) -> list[int]:
        """Return the leader's integers."""
        count = torch.tensor([len(indices)])
        with self._bracket():
            dist.broadcast(count, src=self.ranks[0], group=self._group)
            values = torch.zeros(int(count), dtype=torch.int64)
            if not self.follows:
                values = torch.tensor(indices, dtype=torch.int64)
            dist.broadcast(values, src=self.ranks[0], group=self._group)
        self._last = values  # as ``SideGroup`` does: a thread of gloo's may hold it last
        return list(map(int, values.tolist()))

    def close(self) -> None:
        """End the group's threads, unless the group was ended before."""
        if self._group in process_groups():
            dist.destroy_process_group(self._group)
        del self._group
        self._last = self._flag = None


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
