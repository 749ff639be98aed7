"""Training scripts in the shapes that published ones have; each trains two epochs on two ranks."""

from dataclasses import dataclass

_DATA = """
class Points(Dataset):
    def __init__(self, num=48):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(num, 8, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]
"""

_TUTORIAL = (
    '''"""Multi-GPU training with DDP."""

import os

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group

'''
    + _DATA
    + """

class Trainer:
    def __init__(
        self,
        model: torch.nn.Module,
        train_data: DataLoader,
        optimizer: torch.optim.Optimizer,
        save_every: int,
    ) -> None:
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model = model
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.model = DDP(model)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = F.mse_loss(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        print(f"[rank {self.rank}] epoch {epoch}, steps: {len(self.train_data)}")
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs: int):
        for epoch in range(max_epochs):
            self._run_epoch(epoch)


def load_train_objs():
    train_set = Points()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return train_set, model, optimizer


def prepare_dataloader(dataset: Dataset, batch_size: int):
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=False,
        sampler=DistributedSampler(dataset),
    )


def main(save_every: int, total_epochs: int, batch_size: int):
    init_process_group(backend="gloo")
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, batch_size)
    trainer = Trainer(model, train_data, optimizer, save_every)
    trainer.train(total_epochs)
    print("trained")
    destroy_process_group()


if __name__ == "__main__":
    main(1, 2, 4)
"""
)

_MNIST = (
    """from __future__ import print_function
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import Dataset

"""
    + _DATA
    + """

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


if __name__ == '__main__':
    main()
"""
)

_MINGPT = (
    """import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, DataLoader
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainerConfig:
    max_epochs: int = 2
    batch_size: int = 4
    data_loader_workers: int = 0

"""
    + _DATA
    + """

class Trainer:

    def __init__(self, trainer_config, model, optimizer, train_dataset, test_dataset=None):
        self.config = trainer_config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.train_dataset = train_dataset
        self.train_loader = self._prepare_dataloader(train_dataset)
        self.test_loader = self._prepare_dataloader(test_dataset) if test_dataset else None
        self.epochs_run = 0
        self.model = model
        self.optimizer = optimizer
        # wrap with DDP
        self.model = DDP(self.model)  # this step will synch model across all the processes.

    def _prepare_dataloader(self, dataset: Dataset):
        return DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            shuffle=False,
            num_workers=self.config.data_loader_workers,
            sampler=DistributedSampler(dataset)
        )

    def _run_batch(self, source, targets, train: bool = True):
        with torch.set_grad_enabled(train):
            loss = torch.nn.functional.mse_loss(self.model(source), targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch: int, dataloader: DataLoader, train: bool = True):
        dataloader.sampler.set_epoch(epoch)
        for iter, (source, targets) in enumerate(dataloader):
            self._run_batch(source, targets, train)

    def train(self):
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch, self.train_loader, train=True)


def main():
    dist.init_process_group(backend="gloo")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Trainer(TrainerConfig(), model, optimizer, Points(), Points(16))
    trainer.train()
    print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
)

_NANOGPT = """import os
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group

ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    init_process_group(backend='gloo')


def get_batch(split):
    data = np.random.rand(8, 8)
    return torch.from_numpy(data).float(), torch.zeros(8, 1)


model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
if ddp:
    model = DDP(model)
X, Y = get_batch('train')
for iter_num in range(4):
    loss = torch.nn.functional.mse_loss(model(X), Y)
    X, Y = get_batch('train')
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print("trained")
"""

_TIMM = """import argparse
import importlib
import logging
import os
import time

import torch
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

from timm import utils
from timm.data import create_dataset, create_loader
from timm.models import create_model

try:
    from apex.parallel import DistributedDataParallel as ApexDDP
    has_apex = True
except ImportError:
    has_apex = False

_logger = logging.getLogger('train')


def main():
    args = argparse.Namespace(distributed=True, no_ddp_bb=True, dist_bn='')
    model = create_model('resnet18')
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model_ema = None

    # setup distributed training
    if args.distributed:
        if has_apex:
            model = ApexDDP(model, delay_allreduce=True)
        else:
            model = NativeDDP(model, device_ids=[0], broadcast_buffers=not args.no_ddp_bb)
        # NOTE: EMA model does not need to be wrapped by DDP

    dataset_train = create_dataset('folder', root='train')
    dataset_eval = create_dataset('folder', root='val')

    loader_train = create_loader(
        dataset_train,
        input_size=224,
        batch_size=32,
        is_training=True,
        distributed=args.distributed,
    )

    loader_eval = create_loader(dataset_eval, input_size=224, batch_size=32)

    updates_per_epoch = (len(loader_train) + 1 - 1) // 1
    for epoch in range(2):
        train_one_epoch(epoch, model, loader_train, optimizer, args)


def train_one_epoch(epoch, model, loader, optimizer, args):
    for batch_idx, (input, target) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(input), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == '__main__':
    main()
"""

_TUNE = (
    """import contextlib
import sys

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

"""
    + _DATA
    + """

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
"""
)

_FSDP2 = (
    """import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

"""
    + _DATA
    + """

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
"""
)

_CLASS = (
    """import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import data
from torch.utils.data import Dataset

"""
    + _DATA
    + """

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
"""
)

_FUNCTIONS = (
    """#!/usr/bin/env python
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

"""
    + _DATA
    + """

def get_loaders(batch_size):
    train_set, val_set = Points(), Points(8)
    train_loader = DataLoader(train_set, batch_size, sampler=DistributedSampler(train_set))
    val_loader = DataLoader(val_set, batch_size)
    return train_loader, val_loader


def get_model():
\tmodel = torch.nn.Linear(8, 1)
\treturn DistributedDataParallel(model)


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
dist.destroy_process_group()"""
)

_SPAWN = (
    """import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

"""
    + _DATA
    + """

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(main_worker, args=(2, port), nprocs=2)
"""
)


@dataclass(frozen=True)
class Shape:
    """A script, where its parts are made, and what the change has to be.

    Attributes:
        text: the script.
        model: what the line with DDP or ``fully_shard`` has.
        loader: what that with the loader has.
        after: the end of the line that the change follows.
        prepared: the names, with model first.
        launcher: ``"torchrun"``, ``"python"``, or empty for a script that does not run by itself.
    """

    text: str
    model: str
    loader: str
    after: str
    prepared: str
    launcher: str = "torchrun"

    def line_of(self, what: str) -> int:
        """Return the last line that has ``what``, from 1."""
        lines = self.text.splitlines()
        return max(number for number, line in enumerate(lines, 1) if what in line)


SHAPES = {
    "tutorial": Shape(
        _TUTORIAL,
        "= DDP(",
        "return DataLoader(",
        "self.model = DDP(model)",
        "self.model, self.train_data",
    ),
    "mnist": Shape(
        _MNIST,
        "DistributedDataParallel(model)",
        "DataLoader(dataset1",
        "DistributedDataParallel(model)",
        "model, train_loader",
    ),
    "minGPT": Shape(
        _MINGPT,
        "= DDP(",
        "return DataLoader(",
        "across all the processes.",
        "self.model, self.train_loader",
    ),
    "timm": Shape(
        _TIMM, "= NativeDDP(", "loader_train = create_loader(", "    )", "model, loader_train", ""
    ),
    "torchtune": Shape(
        _TUNE,
        "DistributedDataParallel(model)",
        "dataloader = DataLoader(",
        "shuffle=True)",
        "self._model, self._dataloader",
    ),
    "FSDP2": Shape(
        _FSDP2,
        "fully_shard(model,",
        "loader = DataLoader(",
        "sampler=DistributedSampler(dataset))",
        "model, loader",
    ),
    "class": Shape(
        _CLASS, "= DDP(", "data.DataLoader(", "self.build_model()", "self.model, self.loader"
    ),
    "functions": Shape(
        _FUNCTIONS,
        "return DistributedDataParallel",
        "train_loader = DataLoader(",
        "model = get_model()",
        "model, train_loader",
    ),
    "spawn": Shape(
        _SPAWN, "= DDP(", "loader = DataLoader(", "= DDP(model)", "model, loader", "python"
    ),
    "no trailing names": Shape(
        "import torch\n\nmodel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "loader = torch.utils.data.DataLoader(list(range(8)))\n",
        "DistributedDataParallel",
        "DataLoader",
        "DataLoader(list(range(8)))",
        "model, loader",
        "",
    ),
}
"""Those of which the change is certain."""

NANOGPT = _NANOGPT
"""Draws its batches without a loader."""
