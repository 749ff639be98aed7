"""Accelerate's loop: balanced on a cluster, and plain in one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from evenstep.exceptions import EvenstepWarning
from evenstep.huggingface import balance
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Runtime

from ..torch.plans import Restless
from .small import Plain, Sentences, bert, flat, gpt_in_double, offline

QUIET = Runtime(line_every=None)
WORLD_SIZE = 3


@dataclass(frozen=True)
class Case:
    """A loop of three epochs over batches of 6 on all ranks together."""

    model: Callable[[], nn.Module] = Plain
    num_accumulated: int = 1
    split_batches: bool = False
    drop_last: bool = False
    seedable: bool = True
    num_samples: int = 50


CASES = {
    "plain": Case(),
    "accumulation, the last one short": Case(num_accumulated=2),
    "split_batches": Case(split_batches=True),
    "drop_last": Case(num_accumulated=2, drop_last=True),
    "the sampler's own generator": Case(seedable=False),
}


def prepared(case: Case, batch_size: int, *, gamma: float = 0.97, loader: Any = None) -> Any:
    """Return an accelerator and what it prepared: model, optimizer, loader, scheduler."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.num_accumulated,
        dataloader_config=DataLoaderConfiguration(
            split_batches=case.split_batches, use_seedable_sampler=case.seedable, data_seed=7
        ),
    )
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if loader is None:
        loader = DataLoader(
            Sentences(case.num_samples),
            batch_size=batch_size,
            shuffle=True,
            drop_last=case.drop_last,
            generator=torch.Generator().manual_seed(3),
        )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def loop(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[float]:
    """Train for an epoch as the documentation of Accelerate does; return the steps' rates."""
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return rates


def recipe(accelerator: Any, model: Any, optimizer: Any, loader: Any, _: Any) -> None:
    """Train for an epoch as Accelerate's guide to accumulation with unlike lengths does."""
    batches, num_updates = iter(loader), -(-len(loader) // 2)
    for _update in range(num_updates):
        kept = list(islice(batches, 2))
        own = sum((batch["labels"] != -100).sum() for batch in kept)
        num_items = accelerator.gather(own).sum().item()
        for number, batch in enumerate(kept, start=1):
            is_last = number == len(kept)
            with nullcontext() if is_last else accelerator.no_sync(model):
                logits = model(**batch)["logits"].flatten(0, 1)
                loss = functional.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
                loss = loss * accelerator.gradient_accumulation_steps * accelerator.num_processes
                accelerator.backward(loss / num_items)
        optimizer.step()
        optimizer.zero_grad()


def by_recipe(rank: int, folder: str) -> tuple[torch.Tensor, list[str]]:
    """Return the parameters with a sum, and the warnings without."""
    offline(folder)
    case = Case(num_accumulated=2, num_samples=48)
    parts = list(prepared(case, 2))
    parts[1], parts[3] = balance(
        *parts[:2], parts[3], policy=Restless(), runtime=QUIET, loss_reduction="sum"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EvenstepWarning)
        recipe(*parts)
        parts[3].close()
        silent = [str(one.message) for one in caught]
        assert not [text for text in silent if "A count was gathered" in text]
        other = list(prepared(case, 2))
        other[1], other[3] = balance(*other[:2], other[3], policy=Restless(), runtime=QUIET)
        recipe(*other)
        other[3].close()
    return flat(parts[1]), [str(one.message) for one in caught[len(silent) :]]


def by_recipe_alone(rank: int, folder: str) -> torch.Tensor:
    """Return the parameters of plain Accelerate in one process."""
    offline(folder)
    parts = list(prepared(Case(num_accumulated=2, num_samples=48), 6))
    recipe(*parts)
    return flat(parts[1])


def token_losses(rank: int, folder: str) -> dict[str, list[str]]:
    """Return what is warned of models of transformers, by how they are prepared."""
    offline(folder)
    found = {}
    for name, model, options in (
        ("causal", gpt_in_double(), {}),
        ("of tokens", bert("BertForTokenClassification", 3), {}),
        ("of rows", bert("BertForSequenceClassification", 3), {}),
        ("unit", gpt_in_double(), {"unit": "tokens"}),
        ("sum", gpt_in_double(), {"loss_reduction": "sum"}),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EvenstepWarning)
            with Balancer(runtime=QUIET, **options) as balancer:
                balancer.prepare(model, DataLoader(Sentences(), batch_size=2))
        found[name] = [str(one.message) for one in caught]
    return found


Found = dict[str, tuple[torch.Tensor, list[float], int]]


def on_the_cluster(rank: int, folder: str, names: Sequence[str]) -> Found:
    """Return every case's parameters, rates and length of the loader, under restless plans."""
    offline(folder)
    found = {}
    for name, case in ((name, CASES[name]) for name in names):
        accelerator, model, optimizer, loader, scheduler = prepared(
            case, 6 if case.split_batches else 2
        )
        assert len(loader) > 1
        model, loader = balance(accelerator, model, loader, policy=Restless(), runtime=QUIET)
        parts = accelerator, model, optimizer, loader, scheduler
        rates = [rate for _ in range(3) for rate in loop(*parts)]
        loader.close()
        found[name] = flat(model), rates, len(loader)
    return found


def switched_off(rank: int, folder: str) -> Found:
    """Return the same where the environment leaves the script plain."""
    os.environ["EVENSTEP"] = "off"
    return on_the_cluster(rank, folder, tuple(CASES))


def alone(rank: int, folder: str, names: Sequence[str]) -> Found:
    """Return the same of plain Accelerate in one process.

    With a batch for each of several processes, Accelerate steps the scheduler once for each.
    """
    offline(folder)
    found = {}
    for name, case in ((name, CASES[name]) for name in names):
        gamma = 0.97 if case.split_batches else 0.97**WORLD_SIZE
        accelerator, *parts = prepared(case, 6, gamma=gamma)
        rates = [rate for _ in range(3) for rate in loop(accelerator, *parts)]
        found[name] = flat(parts[0]), rates, len(parts[2])
    return found


def resumed(rank: int, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters of two epochs, unbroken and saved and loaded within the second."""
    offline(folder)
    ends = []
    for stops in (False, True):
        parts = list(prepared(Case(), 2))
        accelerator = parts[0]
        parts[1], parts[3] = balance(
            accelerator, parts[1], parts[3], policy=Restless(), runtime=QUIET
        )
        accelerator.register_for_checkpointing(parts[3])
        loop(*parts)
        if stops:
            _take(parts, 4)
            accelerator.save_state(f"{folder}/state")
            parts[3].close()
            parts = list(prepared(Case(), 2))
            accelerator = parts[0]
            parts[1], parts[3] = balance(accelerator, parts[1], parts[3], runtime=QUIET)
            accelerator.register_for_checkpointing(parts[3])
            accelerator.load_state(f"{folder}/state")
        loop(*parts)
        loop(*parts)
        parts[3].close()
        ends.append(flat(parts[1]))
    return ends[0], ends[1]


def _take(parts: Any, num_steps: int) -> None:
    """Train for so many steps of an epoch, and leave it."""
    accelerator, model, optimizer, loader, scheduler = parts
    for number, batch in enumerate(loader, start=1):
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number == num_steps:
            return


def gathered(rank: int, folder: str) -> dict[str, Any]:
    """Return what comes of gathering in a balanced loop, and in a loop for evaluation in it."""
    offline(folder)
    accelerator, model, _, loader, _ = prepared(Case(), 2)
    held_out = accelerator.prepare(DataLoader(TensorDataset(torch.arange(7.0)), batch_size=2))
    plain = accelerator.gather, accelerator.gather_for_metrics
    model, loader = balance(accelerator, model, loader, policy=Fixed((1, 2, 3)), runtime=QUIET)
    found: dict[str, Any] = {
        name: [] for name in ("rows", "names", "of the loop", "metrics", "evaluated")
    }
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        found["losses"] = len(accelerator.gather_for_metrics(loss))
        objects = accelerator.gather_for_metrics([batch["labels"]], use_gather_object=True)
        names = [str(label) for label in batch["labels"].tolist()]
        found["names"] += accelerator.gather_for_metrics(names)
        found["rows"].append([len(each) for each in objects])
        found["of the loop"] += accelerator.gather(batch)["labels"].tolist()
        metrics = accelerator.gather_for_metrics((loss, batch["labels"]))
        found["metrics"] += metrics[1].tolist()
        found["evaluated"].append(
            [number for (x,) in held_out for number in accelerator.gather_for_metrics(x).tolist()]
        )
        found["still at work"] = accelerator.gradient_state.active_dataloader is loader
    found["left"] = accelerator.gradient_state.active_dataloader is None
    found["as it was"] = (accelerator.gather, accelerator.gather_for_metrics) == plain
    loader.close()
    return found


class Stream(IterableDataset):
    """Numbers, one after the other."""

    def __iter__(self) -> Any:
        return iter(range(40))


def refused(rank: int, folder: str) -> dict[str, str]:
    """Return the errors of what cannot be balanced."""
    offline(folder)
    found = {}
    accelerator, model, optimizer, loader, _ = prepared(Case(), 2)
    dispatched = prepared(Case(), 2, loader=DataLoader(Stream(), batch_size=2))
    stream = DataLoader(Stream(), batch_size=2)
    custom = DataLoader(Sentences(), batch_sampler=[[0, 1], [2, 3]])
    compiled = torch.compile(model)
    for name, parts in {
        "optimizer": (model, optimizer, loader),
        "two loaders": (model, loader, loader),
        "no loader": (model, 3),
        "dispatcher": (model, dispatched[3]),
        "stream": (model, stream),
        "batch sampler": (model, custom),
        "compiled around DDP": (compiled, loader),
    }.items():
        try:
            balance(accelerator, *parts, runtime=QUIET)
        except ValueError as error:
            found[name] = str(error)
    model, loader = balance(accelerator, model, loader, runtime=QUIET)
    try:
        accelerator.skip_first_batches(loader, 2)
    except ValueError as error:
        found["skipped"] = str(error)
    try:
        loader.skip(len(loader))
    except ValueError as error:
        found["skipped too far"] = str(error)
    loader.close()
    return found


class Told:
    """A sampler that keeps what it is told of epochs."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter(range(12))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def bare(rank: int, folder: str) -> tuple[list[int], list[int], list[int]]:
    """Return sizes of the steps of a loader that was not prepared, whole and with one skipped.

    And what its sampler was told of epochs.
    """
    offline(folder)
    accelerator, model, *_ = prepared(Case(), 2)
    told = Told()
    model, loader = balance(
        accelerator,
        model,
        DataLoader(Sentences(12), batch_size=2, sampler=told),
        policy=Fixed((1, 2, 3)),
        runtime=QUIET,
    )
    seen: list[list[int]] = []
    for skipped in (0, 1):
        loader.skip(skipped)
        seen.append([len(batch["labels"]) for batch in _trained(accelerator, model, loader)])
    loader.set_epoch(7)
    for _ in _trained(accelerator, model, loader):
        pass
    loader.close()
    return seen[0], seen[1], told.epochs


class Numbered(Told):
    """A sampler with an order for each epoch that it is told."""

    epoch = 0

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(12, generator=generator).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def at_the_end(rank: int, folder: str, prepare: bool) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return the orders of three epochs, and of the third alone after a restart.

    Args:
        rank: this process.
        folder: passed on.
        prepare: whether the sampler is Accelerate's own, which counts epochs itself.
    """
    offline(folder)
    states: dict[str, Any] = {}
    accelerator, model, loader = _numbered(prepare)
    orders = []
    for epoch in range(3):
        order: list[int] = []
        for batch in _trained(accelerator, model, loader):
            order += batch["input_ids"].flatten().tolist()
            if epoch == 1 and loader.end_of_dataloader:
                states["in the last batch"] = loader.state_dict()
        orders.append(order)
        if epoch == 1:
            states["after the loop"] = loader.state_dict()
    loader.close()
    found = {}
    for name, state in states.items():
        accelerator, model, loader = _numbered(prepare)
        loader.load_state_dict(state)
        batches = list(_trained(accelerator, model, loader))
        found[name] = [each for batch in batches for each in batch["input_ids"].flatten().tolist()]
        loader.close()
    return orders, found


def _numbered(prepare: bool) -> tuple[Any, Any, Any]:
    accelerator, model, _, loader, _ = prepared(Case(num_samples=12), 2)
    if not prepare:
        loader = DataLoader(Sentences(12), batch_size=2, sampler=Numbered())
    return accelerator, *balance(accelerator, model, loader, runtime=QUIET)


def _trained(accelerator: Any, model: Any, loader: Any) -> Any:
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        yield batch
