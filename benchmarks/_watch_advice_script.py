"""Trains as it is, to be watched, or with the advice: two ranks, one a third as fast.

Usage: torchrun --nproc-per-node 2 benchmarks/_watch_advice_script.py KIND plain|balanced
"""

from __future__ import annotations

import os
import sys
from functools import partial
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks._sleepers import Due
from benchmarks._watch_advice_clock import BATCH, NUM_STEPS, Clock

SAMPLE_S = (0.0025, 0.0075)  # by rank
RANK = int(os.environ["RANK"])


class Rows(Dataset[Any]):
    """Samples of one size."""

    def __init__(self, *, named: bool = False) -> None:
        self.named = named

    def __len__(self) -> int:
        return NUM_STEPS * BATCH * len(SAMPLE_S)

    def __getitem__(self, index: int) -> Any:
        row = torch.full((8,), index % 7 / 7)
        return {"x": row, "labels": row.sum()} if self.named else (row, row.sum())


class Device(nn.Module):
    """A third of the rank's time in the forward, the rest in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        """Return the outputs; with labels, the loss, as ``Trainer`` wants it."""
        seconds = SAMPLE_S[RANK] * len(x)
        sleep(seconds / 3)
        out: Tensor = Due.apply(self.layer(x), partial(sleep, 2 / 3 * seconds))[:, 0]  # type: ignore[no-untyped-call]
        return out if labels is None else {"loss": (out - labels).square().mean()}


def of_my_own(clock: Clock, *, balanced: bool, sharded: bool) -> None:
    """Train in a loop of one's own, in DDP or FSDP2."""
    model: Any = Device()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    sampler: Any = DistributedSampler(Rows(), shuffle=False)
    loader: Any = DataLoader(Rows(), batch_size=BATCH, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if balanced:
        from evenstep.torch import Balancer

        model, loader = Balancer().prepare(model, loader)
    for step in loader.steps() if balanced and sharded else loader:
        for x, y in step if balanced and sharded else [step]:
            (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def accelerated(clock: Clock, *, balanced: bool) -> None:
    """Train in Accelerate's loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = Device()
    loader: Any = DataLoader(Rows(), batch_size=BATCH)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if balanced:
        from evenstep.huggingface import balance

        model, loader = balance(accelerator, model, loader)
    for x, y in loader:
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def by_trainer(clock: Clock, *, balanced: bool) -> None:
    """Have ``Trainer`` train."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            clock.tick()

    kind: Any = Trainer
    if balanced:
        from evenstep.huggingface import BalancedMixin

        kind = type("BalancedTrainer", (BalancedMixin, Trainer), {})
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    kind(Device(), arguments, train_dataset=Rows(named=True), callbacks=[Ticks()]).train()


def main() -> None:
    """Train as the arguments say."""
    kind, balanced, clock = sys.argv[1], sys.argv[2] == "balanced", Clock()
    if kind == "Trainer":
        by_trainer(clock, balanced=balanced)
    elif kind == "Accelerate":
        accelerated(clock, balanced=balanced)
    else:
        dist.init_process_group("gloo")
        of_my_own(clock, balanced=balanced, sharded=kind == "FSDP2")
    if RANK == 0:
        clock.say(SAMPLE_S[RANK] * BATCH)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
