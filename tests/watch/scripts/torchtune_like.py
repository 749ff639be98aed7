import contextlib
import sys

import torch
from torch import distributed as dist
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


class FinetuneRecipe:
    def __init__(self, epochs, accumulation):
        self.epochs = epochs
        self._gradient_accumulation_steps = accumulation

    def setup(self):
        self._model = self._setup_model(compile_model=False)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._sampler, self._dataloader = self._setup_data(batch_size=4, shuffle=True)
        self._steps_per_epoch = len(self._dataloader) // self._gradient_accumulation_steps

    def _setup_model(self, compile_model):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        model = DistributedDataParallel(model)
        return model

    def _setup_data(self, batch_size, shuffle):
        ds = Points()
        sampler = DistributedSampler(ds, shuffle=shuffle, seed=0)
        dataloader = DataLoader(dataset=ds, batch_size=batch_size, sampler=sampler)
        return sampler, dataloader

    def train(self):
        for curr_epoch in range(self.epochs):
            self._sampler.set_epoch(curr_epoch)
            for idx, (x, y) in enumerate(self._dataloader):
                is_last = (idx + 1) % self._gradient_accumulation_steps == 0
                with contextlib.nullcontext() if is_last else self._model.no_sync():
                    loss = torch.nn.functional.mse_loss(self._model(x), y)
                    loss = loss / self._gradient_accumulation_steps
                    loss.backward()
                if is_last:
                    self._optimizer.step()
                    self._optimizer.zero_grad(set_to_none=True)


def recipe_main() -> None:
    dist.init_process_group("gloo")
    recipe = FinetuneRecipe(epochs=2, accumulation=2)
    recipe.setup()
    recipe.train()
    print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(recipe_main())
