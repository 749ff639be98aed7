"""hivemind: its optimizer, whose averager weighs gradients by samples."""

from __future__ import annotations

import os
from threading import Thread

import hivemind
from _task import OnDevice, Rank
from torch.nn.functional import cross_entropy

BATCH_SIZE = 8
"""Samples between two looks at what the others have: the smaller, the less a peer overshoots."""
MATCHMAKING_S = 3.0
"""How long peers look for each other, as its guide says for small local runs."""


def main() -> None:
    """Train until the first peer has taken the number of steps, each peer as fast as it is."""
    rank = Rank()
    first = rank.rank == 0
    peers = None if first else rank.hears("peers").split()
    dht = hivemind.DHT(initial_peers=peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    if first:
        rank.says("peers", " ".join(str(address) for address in dht.get_visible_maddrs()))
    device = rank.model()
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="digits",
        batch_size_per_step=BATCH_SIZE,
        target_batch_size=rank.setting.global_batch_size,
        params=device.parameters(),
        optimizer=rank.optimizer,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=30.0,
        averager_opts={"request_timeout": 1.0},  # to be below the time for matchmaking
    )
    if not first:
        Thread(target=leave_with_the_first, args=(rank, device), daemon=True).start()
    most = 4 * rank.setting.num_steps * rank.setting.global_batch_size
    for indices in rank.order(most, seed=rank.setting.seed * 4 + rank.rank).split(BATCH_SIZE):
        if first and optimizer.local_epoch >= rank.setting.num_steps:
            break
        x, y = rank.train[indices]
        cross_entropy(device(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if first:
        rank.says("finished", "")
    leave_with_the_first(rank, device, optimizer.local_epoch)


def leave_with_the_first(rank: Rank, device: OnDevice, num_updates: int = 0) -> None:
    """End as soon as the first peer has: a peer left alone waits for others, or for their state."""
    rank.hears("finished")
    rank.done(device, num_updates)
    os._exit(0)  # its processes may not end by themselves


if __name__ == "__main__":
    main()
