"""AdaptDL: its loader and its DDP, with the given global batch."""

from __future__ import annotations

import os

from _task import GLOBAL_BATCH_SIZE, WORLD_SIZE, Rank
from torch.nn.functional import cross_entropy


def main() -> None:
    """Train as its `linear_regression` example does; without its scheduler, which is Kubernetes."""
    rank = Rank()
    port = os.environ["MASTER_PORT"]
    os.environ.update(
        ADAPTDL_REPLICA_RANK=str(rank.rank),
        ADAPTDL_NUM_REPLICAS=str(WORLD_SIZE),
        ADAPTDL_MASTER_ADDR="127.0.0.1",
        ADAPTDL_MASTER_PORT=port,
    )
    import adaptdl.torch as adl

    adl.init_process_group("gloo")
    device = rank.model()
    optimizer = rank.optimizer(device.parameters())
    model = adl.AdaptiveDataParallel(device, optimizer)
    loader = adl.AdaptiveDataLoader(rank.train, batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
    for _ in adl.remaining_epochs_until(rank.setting.num_epochs):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    rank.done(device, rank.setting.num_steps)


if __name__ == "__main__":
    main()
