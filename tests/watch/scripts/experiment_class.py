import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import data
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


class Experiment:
    def __init__(self, epochs=2):
        self.epochs = epochs
        self.build_data()
        self.build_model()
        self.build_optimizer()

    def build_data(self):
        dataset = Points()
        self.sampler = data.DistributedSampler(dataset)
        self.loader = data.DataLoader(dataset, batch_size=4, sampler=self.sampler, num_workers=0)

    def build_model(self):
        self.model = DDP(nn.Linear(8, 1))

    def build_optimizer(self):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def run(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Experiment().run()
    print("trained")
    dist.destroy_process_group()
