"""torchft: its DDP, sampler and optimizer, as in its `train_ddp.py`; each worker is a replica."""

from __future__ import annotations

from datetime import timedelta

from _task import GLOBAL_BATCH_SIZE, WORLD_SIZE, Rank
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.coordination import LighthouseServer

HERE = "127.0.0.1"


def main() -> None:
    """Train until the number of steps is done; no worker fails."""
    rank = Rank()
    if rank.rank == 0:
        lighthouse = LighthouseServer(bind=f"{HERE}:0", min_replicas=WORLD_SIZE)
        rank.says("lighthouse", f"http://{HERE}:{lighthouse.address().rpartition(':')[2]}")
    device = rank.model()
    store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=WORLD_SIZE,
        load_state_dict=lambda state: None,
        state_dict=dict,
        replica_id=f"replica_{rank.rank}",
        rank=0,
        world_size=1,
        store_addr=HERE,
        store_port=store.port,
        lighthouse_addr=rank.hears("lighthouse"),
        hostname=HERE,
        init_sync=False,  # all begin with the same parameters
    )
    model = DistributedDataParallel(manager, device)
    optimizer = Optimizer(manager, rank.optimizer(model.parameters()))
    sampler = DistributedSampler(
        rank.train,
        replica_rank=rank.rank,
        num_replica_groups=WORLD_SIZE,
        group_rank=0,
        num_replicas=1,
        seed=rank.setting.seed,
    )
    loader = DataLoader(rank.train, batch_size=GLOBAL_BATCH_SIZE // WORLD_SIZE, sampler=sampler)
    for epoch in range(rank.setting.num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    rank.done(device, manager.current_step())
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
