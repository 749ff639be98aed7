"""A complete training script: once in plain PyTorch, once balanced, as the file's name says.

Start it with `torchrun --standalone --nproc-per-node 2` and its name.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def products(num_samples):
    """Made-up data: the target is a sum of products that a linear model cannot learn."""
    x = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, :8] * x[:, 8:]).sum(dim=1, keepdim=True))


def main():
    dist.init_process_group()
    torch.manual_seed(0)
    dataset = products(6000)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=50, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {len(loader)} steps, last loss {loss.item():.3f}", flush=True)

    if dist.get_rank() == 0:
        x, y = dataset.tensors
        print(f"loss over all samples: {F.mse_loss(model.module(x), y).item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
