import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self, num=48):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num, 8, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.mse_loss(output, target)
        loss.backward()
        optimizer.step()


def test(model, test_loader):
    model.eval()
    with torch.no_grad():
        return sum(F.mse_loss(model.module(x), y).item() for x, y in test_loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train_kwargs = {"batch_size": 4}
    dataset1 = Points()
    dataset2 = Points(8)
    sampler = torch.utils.data.distributed.DistributedSampler(dataset1)
    train_loader = torch.utils.data.DataLoader(dataset1, sampler=sampler, **train_kwargs)
    test_loader = torch.utils.data.DataLoader(dataset2, batch_size=8)

    model = nn.Linear(8, 1)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
    print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
