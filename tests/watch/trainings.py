"""Training scripts as users write them, without a word of evenstep: ``trainings.py KIND``.

Each prints the losses of a rank, bit by bit. ``SLOW`` is the rank whose forward takes long.
"""

import os
import random
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SLOW = int(os.environ.get("SLOW", "-1"))
STEPS = int(os.environ.get("STEPS", "24"))
SLEEP_S = float(os.environ.get("SLEEP_S", "0.06"))


class Small(nn.Module):
    """Sleeps as long as another device would compute."""

    def __init__(self, norm=False, sleeps=True):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32) if norm else nn.ReLU(), nn.Linear(32, 1)
        )
        self.sleeps = sleeps

    def forward(self, inputs):
        if self.training and self.sleeps:
            sleep()
        return self.layers(inputs)


def sleep():
    slow = (dist.get_rank() if dist.is_initialized() else 0) == SLOW
    time.sleep(SLEEP_S if slow else SLEEP_S / 6)


def data():
    torch.manual_seed(0)
    return TensorDataset(torch.randn(512, 16), torch.randn(512, 1))


def say(losses):
    """In one write, and on a line of its own: another rank may be in the middle of one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    text = " ".join(float(loss).hex() for loss in losses)
    os.write(1, f"\nLOSSES {rank} {text}\n".encode())


def batches(loader):
    while True:
        yield from loader


def train(model, loader, *, accumulate=1, sleeps=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, (inputs, targets) in enumerate(batches(loader)):
        if sleeps:
            sleep()
        holds = (number + 1) % accumulate
        with model.no_sync() if holds else nullcontext():
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
        losses.append(loss.item())
        if not holds:
            optimizer.step()
            optimizer.zero_grad()
        if len(losses) == STEPS:
            return losses


def loader_of(**settings):
    found = data()
    return DataLoader(found, batch_size=8, sampler=DistributedSampler(found), **settings)


def ddp(**settings):
    dist.init_process_group("gloo")
    loader = loader_of(**settings)
    torch.manual_seed(1)
    say(train(DistributedDataParallel(Small()), loader))
    dist.destroy_process_group()


def workers():
    ddp(num_workers=1, multiprocessing_context="spawn")


def accumulating():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    say(train(DistributedDataParallel(Small()), loader_of(), accumulate=3))
    dist.destroy_process_group()


def hand_made():
    """As nanoGPT: no loader, the next batch before the backward, evaluations on one rank alone."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(Small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2 + dist.get_rank())
    batch, losses = torch.randn(8, 16), []
    for number in range(STEPS):
        if number % 8 == 0 and dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                losses += [model(torch.randn(8, 16)).sum().item() for _ in range(4)]
            model.train()
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            loss = model(batch).square().mean() / 2
            batch = torch.randn(8, 16)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    say(losses)
    dist.destroy_process_group()


def norms():
    """With buffers that DDP broadcasts, an evaluation and a checkpoint."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(Small(norm=True))
    losses = train(model, loader_of())
    model.eval()
    with torch.no_grad():
        for inputs, _ in loader_of():
            losses.append(model(inputs).sum().item())
    model.train()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), os.devnull)
    losses += train(model, loader_of())
    say(losses)
    dist.destroy_process_group()


def reporting():
    """Rank ``SLOW`` writes a log after each step; then all meet, in collectives of the script's."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(Small(sleeps=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _, (inputs, targets) in zip(range(STEPS), batches(loader_of()), strict=False):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sleep()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        dist.barrier()
        losses.append(mean.item())
    say(losses)
    dist.destroy_process_group()


def compiled():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.compile(DistributedDataParallel(Small(sleeps=False)), backend="aot_eager")
    say(train(model, loader_of(), sleeps=True))
    dist.destroy_process_group()


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(Small(), nn.Linear(1, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    say(train(model, loader_of()))
    dist.destroy_process_group()


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = FullyShardedDataParallel(Small(), device_id=torch.device("cpu"))
    say(train(model, loader_of()))
    dist.destroy_process_group()


def _spawned(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    ddp()


def spawn():
    port = str(random.randrange(20_000, 32_000))
    torch.multiprocessing.spawn(_spawned, (port,), nprocs=2)


def alone():
    torch.manual_seed(1)
    model = Small()
    model.no_sync = nullcontext
    say(train(model, DataLoader(data(), batch_size=8)))


class Odd(dict):
    """Inputs that show their tensors a few times, and then no more."""

    shown = 0

    def values(self):
        Odd.shown += 1
        if Odd.shown > 10:
            raise RuntimeError("odd inputs")
        return super().values()


class Reads(Small):
    def forward(self, inputs):
        return super().forward(inputs["x"])


def odd_inputs():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    batch = {"x": torch.randn(8, 16)}
    say(train(DistributedDataParallel(Reads()), [(Odd(batch), torch.zeros(8, 1))]))
    dist.destroy_process_group()


def fails():
    """An error of the user's in the middle."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    train(DistributedDataParallel(Small()), loader_of())
    dist.barrier()
    raise RuntimeError("of the user's")


def accelerated():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    made = Small()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        made, optimizer, DataLoader(data(), batch_size=8, shuffle=True)
    )
    losses = []
    for inputs, targets in batches(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == STEPS:
            break
    say(losses)
    accelerator.end_training()


class ForTrainer(nn.Module):
    """As ``Trainer`` wants a model."""

    def __init__(self):
        super().__init__()
        self.small = Small()

    def forward(self, inputs, labels):
        predicted = self.small(inputs)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


def trainer(folder):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses = []

    class Kept(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            losses.append(logs.get("loss", 0.0))

    rows = [{"inputs": inputs, "labels": targets} for inputs, targets in data()]
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    torch.manual_seed(1)
    Trainer(ForTrainer(), arguments, train_dataset=rows, callbacks=[Kept()]).train()
    say(losses)


def lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.small, self.losses = Small(), []

        def training_step(self, batch, _):
            loss = nn.functional.mse_loss(self.small(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    lightning.seed_everything(1)
    module = Module()
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(data(), batch_size=8))
    say(module.losses)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
