"""hivemind: its optimizer, whose averager weighs gradients by samples."""

from __future__ import annotations

import os

import hivemind
from _task import GLOBAL_BATCH_SIZE, Rank
from torch.nn.functional import cross_entropy

BATCH_SIZE = 8
"""Samples between two looks at what the others have: the smaller, the less a peer overshoots."""
MATCHMAKING_S = 0.5
"""How long peers look for each other; its guide says 3 to 5 s for small local runs."""


def main() -> None:
    """Train until the swarm has taken the number of steps; each peer as fast as it is."""
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
        target_batch_size=GLOBAL_BATCH_SIZE,
        params=device.parameters(),
        optimizer=rank.optimizer,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=30.0,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2},
    )
    most = 4 * rank.setting.num_steps * GLOBAL_BATCH_SIZE
    for indices in rank.order(most, seed=rank.setting.seed * 4 + rank.rank).split(BATCH_SIZE):
        if optimizer.local_epoch >= rank.setting.num_steps:
            break
        x, y = rank.train[indices]
        cross_entropy(device(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    rank.done(device, optimizer.local_epoch)
    os._exit(0)  # its processes may not end by themselves


if __name__ == "__main__":
    main()
