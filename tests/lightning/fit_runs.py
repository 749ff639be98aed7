"""Fits of Lightning's Trainer: balanced on a cluster, plain on it, and plain in one process."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, TensorDataset

from evenstep.lightning import BalanceCallback
from evenstep.torch import Runtime

from ..torch.models import Mlp
from ..torch.plans import Restless

QUIET = Runtime(line_every=None)
GLOBAL_BATCH_SIZE = 12
NUM_SAMPLES, NUM_HELD_OUT = 50, 41  # an epoch ends with 2 samples, a validation with 5
BALANCED = {"policy": Restless(), "runtime": QUIET}


@dataclass(frozen=True)
class Case:
    """A fit of two epochs, the same on any number of ranks."""

    trainer: dict[str, Any] = field(default_factory=dict)
    buffers: bool = False  # whether every forward of DDP is a collective
    from_module: bool = False  # whether the loaders come from a `LightningDataModule`
    own_sampler: bool = False
    own_batches: bool = False
    num_workers: int = 0
    stream: bool = False
    asks_early: bool = True  # whether the module asks how many steps there will be
    sharded: tuple[str, ...] = ()  # names of what FSDP2 shards, where it does


CASES = {
    "loaders of a data module, accumulated, clipped": Case(
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, from_module=True
    ),
    "fewer batches": Case({"limit_train_batches": 3, "limit_val_batches": 0.5}),
    "max_steps, validation within an epoch": Case({"max_steps": 8, "val_check_interval": 2}),
    "buffers": Case({"limit_val_batches": 2}, buffers=True),
    "a sampler of one's own, loader workers": Case(own_sampler=True, num_workers=1),
    "batches of one's own": Case({"use_distributed_sampler": False}, own_batches=True),
    "overfitting": Case({"overfit_batches": 3}),
    "a stream": Case(stream=True, asks_early=False),
    "FSDP2, accumulated": Case(
        {"accumulate_grad_batches": 2}, sharded=("net.layers.0", "net.layers.2", "net")
    ),
}


class Order(Sampler):
    """The order of an epoch, as ``DistributedSampler`` has it on all ranks, or another one."""

    def __init__(self, *, shuffled: bool) -> None:
        self.epoch = 0
        self.shuffled = shuffled

    def __len__(self) -> int:
        return NUM_SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        if self.shuffled:
            generator = torch.Generator().manual_seed(self.epoch)
            return iter(torch.randperm(NUM_SAMPLES, generator=generator).tolist())
        return iter([(7 * self.epoch - place) % NUM_SAMPLES for place in range(NUM_SAMPLES)])


class Stream(IterableDataset):
    """The samples in their order, whichever rank reads them."""

    def __iter__(self) -> Any:
        return iter(samples(NUM_SAMPLES, 1))


class Scores(lightning.LightningModule):
    """A small model which logs its loss in all ways that Lightning has for it."""

    def __init__(
        self, *, buffers: bool = False, asks_early: bool = True, sharded: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.asks_early, self.sharded = asks_early, sharded
        torch.manual_seed(0)
        self.net = Mlp().double()
        if buffers:
            self.net.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.told: dict[str, list[float]] = {"step": [], "epoch": [], "val": [], "val_step": []}
        self.sizes: list[int] = []
        self.num_validated = 0

    def configure_model(self) -> None:
        for name in self.sharded if self.trainer.world_size > 1 else ():
            fully_shard(self.get_submodule(name), mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.sizes.append(len(x))
        loss = functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.told["step"].append(float(self.trainer.callback_metrics["loss_step"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        if not self.trainer.sanity_checking:
            self.num_validated += len(x)
        loss = functional.cross_entropy(self.net(x), y)
        self.log("val", loss, sync_dist=True)
        self.log("val_step", loss, on_step=True, on_epoch=False, sync_dist=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.told["val_step"].append(float(self.trainer._results["validation_step.val_step"].value))

    def on_validation_end(self) -> None:
        self.told["val"].append(float(self.trainer.callback_metrics["val"]))

    def on_train_epoch_end(self) -> None:
        self.told["epoch"].append(float(self.trainer.callback_metrics["loss_epoch"]))

    def configure_optimizers(self) -> Any:
        # Which asks for the loader this early, and reads from a stream.
        steps = self.trainer.estimated_stepping_batches if self.asks_early else 10
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=int(steps) // 2)]


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(5, (count,), generator=generator))


def loaders(case: Case, world_size: int) -> tuple[DataLoader, DataLoader]:
    """Return loaders for training and validation, as a script has them on so many ranks."""
    size = GLOBAL_BATCH_SIZE // world_size
    train: dict[str, Any] = {"batch_size": size, "num_workers": case.num_workers}
    if case.own_sampler or world_size == 1:
        train["sampler"] = Order(shuffled=not case.own_sampler)
    else:
        train["shuffle"] = True
    held_out = DataLoader(samples(NUM_HELD_OUT, 2), batch_size=size)
    if case.own_batches:
        batches = BatchSampler(Order(shuffled=False), GLOBAL_BATCH_SIZE, drop_last=False)
        return DataLoader(samples(NUM_SAMPLES, 1), batch_sampler=batches), held_out
    if case.stream:
        return DataLoader(Stream(), batch_size=size, drop_last=True), held_out
    return DataLoader(samples(NUM_SAMPLES, 1), **train), held_out


class Data(lightning.LightningDataModule):
    """The same loaders, from a data module."""

    def __init__(self, case: Case, world_size: int) -> None:
        super().__init__()
        self.loaders = loaders(case, world_size)

    def train_dataloader(self) -> DataLoader:
        return self.loaders[0]

    def val_dataloader(self) -> DataLoader:
        return self.loaders[1]


@dataclass
class Fitted:
    """What came of a fit."""

    parameters: torch.Tensor
    told: dict[str, list[float]]
    sizes: list[int]
    num_validated: int
    num_steps: int


def parameters(model: nn.Module) -> torch.Tensor:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).clone()


def trainer_of(world_size: int, callbacks: list[Any], **options: Any) -> lightning.Trainer:
    """Return a trainer of two epochs that prints nothing."""
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{
            "max_epochs": 2,
            "enable_checkpointing": False,
            "strategy": "ddp" if world_size > 1 else "auto",
            **options,
        },
    )


def fit(
    case: Case,
    world_size: int,
    callbacks: list[Any],
    *,
    ckpt_path: str | None = None,
    **options: Any,
) -> Fitted:
    """Train in this process, which is one of so many."""
    module = Scores(buffers=case.buffers, asks_early=case.asks_early, sharded=case.sharded)
    if case.sharded and world_size > 1:
        strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
        options["strategy"] = strategy
    trainer = trainer_of(world_size, callbacks, **{**case.trainer, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.from_module:
            trainer.fit(module, datamodule=Data(case, world_size), ckpt_path=ckpt_path)
        else:
            trainer.fit(module, *loaders(case, world_size), ckpt_path=ckpt_path)
    ends = parameters(module)
    return Fitted(ends, module.told, module.sizes, module.num_validated, trainer.global_step)


def balanced(rank: int, world_size: int, name: str) -> Fitted:
    """Train as the case says, under plans that change at every step."""
    case = CASES[name]
    options: dict[str, Any] = {"stream": "same"} if case.stream else {}
    if case.own_batches:
        options["global_batch_size"] = GLOBAL_BATCH_SIZE
    return fit(case, world_size, [BalanceCallback(**options, **BALANCED)])


def alone(name: str) -> Fitted:
    """Train in one process, plainly, on the same global batches."""
    return fit(CASES[name], 1, [])


# Where a checkpoint was saved, by a word: in which fit, and after how many steps.
SAVED = {
    "within": (Case(), 7),  # the second step of the second epoch
    "within, asked late": (Case(asks_early=False), 7),
    "after a short one": (Case({"limit_train_batches": 3, "max_steps": 6}), 3),
    "at the end": (Case({"max_steps": 10}), 5),
}


def saved(rank: int, world_size: int, folder: str, where: str) -> Fitted:
    """Train two epochs, of five steps if they are whole, and save on the way."""
    case, step = SAVED[where]
    keeps = ModelCheckpoint(folder, "{step}", every_n_train_steps=step, save_top_k=-1)
    callbacks = [BalanceCallback(**BALANCED), keeps]
    return fit(case, world_size, callbacks, enable_checkpointing=True)


def resumed(
    rank: int, world_size: int, folder: str, where: str, off: bool = False
) -> dict[str, Any]:
    """Go on from there."""
    if off:
        os.environ["EVENSTEP"] = "off"
    callback = BalanceCallback(**BALANCED)
    case, step = SAVED[where]
    path = os.path.join(folder, f"step={step}.ckpt")
    begun = dict(torch.load(path, weights_only=True)["callbacks"])
    fitted = fit(case, world_size, [callback], ckpt_path=path)
    learnt = json.loads(begun["BalanceCallback"]["estimates"])
    return {"fitted": fitted, "saved": learnt["workers"]}


def switched_off(rank: int) -> tuple[Fitted, Fitted]:
    """Return what a plain trainer makes, and one with the callback."""
    plain = fit(CASES["fewer batches"], 2, [])
    os.environ["EVENSTEP"] = "off"
    return plain, fit(CASES["fewer batches"], 2, [BalanceCallback(**BALANCED)])


def twice(rank: int) -> dict[str, Any]:
    """Fit two times with one trainer, and test in between and after; return what is left."""
    callback = BalanceCallback(**BALANCED)
    trainer, module = trainer_of(2, [callback], max_epochs=1), Scores()
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, *loaders(Case(), 2))
            sizes.append(callback.balancer.batch_sizes)
            trainer.validate(module, loaders(Case(), 2)[1], verbose=False)
    return {
        "sizes": sizes,
        "patches": sorted(vars(trainer.strategy).keys() & {"reduce", "process_dataloader"}),
        "hooks": len(module._forward_hooks) + len(module._forward_pre_hooks),
        "loss": module.told["step"],
    }


class Deciding(Scores):
    """Has all ranks decide in a step whether it is to be left out, as for a loss of no number."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        agree, any_of_them = (
            self.trainer.strategy.reduce_boolean_decision(self.global_rank in ranks, all=is_all)
            for ranks, is_all in (({0, 1}, True), ({0}, False))
        )
        self.told["step"].append(float(agree) + 2 * float(any_of_them))
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        pass


def decided(rank: int) -> list[float]:
    """Return what ranks have decided in each step: 3 if all agreed, and one of them alone."""
    module = Deciding()
    options = {"max_epochs": 1, "limit_val_batches": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_of(2, [BalanceCallback(**BALANCED)], **options).fit(module, *loaders(Case(), 2))
    return module.told["step"]
