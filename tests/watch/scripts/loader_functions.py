#!/usr/bin/env python
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
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


def get_loaders(batch_size):
    train_set, val_set = Points(), Points(8)
    train_loader = DataLoader(train_set, batch_size, sampler=DistributedSampler(train_set))
    val_loader = DataLoader(val_set, batch_size)
    return train_loader, val_loader


def get_model():
    model = torch.nn.Linear(8, 1)
    return DistributedDataParallel(model)


def fit(model, train_loader, val_loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in train_loader:
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


dist.init_process_group("gloo")
train_loader, val_loader = get_loaders(4)
print(len(train_loader), "steps")
model = get_model()
balancer = "a name that is taken"
fit(model, train_loader, val_loader, 2)
print("trained")
dist.destroy_process_group()
