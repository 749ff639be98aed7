"""A script in the shape of the DDP tutorial, for ``published_watch --quick``."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main(num_steps: int) -> None:
    """Train on the device of this process's number."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group(backend="nccl")
    inputs = torch.randn(8 * num_steps * dist.get_world_size(), 20)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    model = DDP(torch.nn.Linear(20, 1).to(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for source, targets in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(source.to(local_rank)), targets.to(local_rank))
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
