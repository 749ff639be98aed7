import os
import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Points(Dataset):
    def __init__(self, num=48):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num, 8, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def main_worker(rank, world_size, port, use_ddp=True):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    dataset = Points()
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
    model = torch.nn.Linear(8, 1)
    if use_ddp:
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for x, y in loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main_worker, args=(2, random.randrange(20_000, 32_000)), nprocs=2)
