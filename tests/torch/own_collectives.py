"""What the workers run that look at each of the balancer's own collectives while one is late."""

from __future__ import annotations

import threading
from time import monotonic, sleep

import torch
import torch.distributed as dist

from evenstep._planner import Job, Planner
from evenstep.policies import Auto
from evenstep.torch._exchange._side_group import Bracket, PeerGroup, SideGroup
from evenstep.torch._exchange._startup import is_in_collective


class Noting:
    """Notes when a collective is entered and left; nobody is ever lost."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.stopping = False

    def check(self) -> None:
        """Nobody was lost."""

    def enter_collective(self) -> bool:
        """Note it."""
        self.notes.append("in")
        return True

    def leave_collective(self) -> None:
        """Note it."""
        self.notes.append("out")

    def verdict(self, *, within_s: float) -> None:
        """Nobody was lost."""


def watch(rank: int) -> dict[str, tuple[bool, list[str]]]:
    """Rank 1 makes each collective of the balancer's own and waits for rank 0 in it.

    Return whether it was seen to be stuck in there, and what was noted.
    """
    side, store = SideGroup(None), dist.distributed_c10d._get_default_store()
    bracket = Bracket()
    peers = PeerGroup([0, 1], bracket)
    bracket.watch = noting = Noting()
    side.watch_by(noting)
    plan = Planner(Auto(), Job(2, 16)).plan
    calls = {
        "share": lambda: side.share(1),
        "share_indices": lambda: side.share_indices([1] if rank == 0 else None),
        "collect": lambda: side.collect(1),
        "sum": lambda: side.sum(torch.ones(1)),
        "agree": lambda: peers.agree(plan, noting),
        "peers' share": lambda: peers.share([1]),
    }
    found = {}
    for name, call in calls.items():
        if rank == 0:
            store.wait([name])
            call()
            continue
        noting.notes.clear()
        thread = threading.Thread(target=call)
        thread.start()
        until_s = monotonic() + 5
        while not (stuck := is_in_collective(thread.ident)) and monotonic() < until_s:
            sleep(0.01)
        store.set(name, "seen")
        thread.join(10)
        found[name] = stuck, list(noting.notes)
    peers.close()
    side.close()
    return found
