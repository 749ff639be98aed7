import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
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


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    fsdp_kwargs = {}
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)

    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    dataset = Points()
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))

    for epoch in range(2):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optim.step()
            optim.zero_grad()
    print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
