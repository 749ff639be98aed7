"""Loops that differ in what a batch is, and in what becomes of it before the forward."""

from __future__ import annotations

import torch
from torch.nn import functional

from ._data import (
    Crops,
    Dicts,
    Nested,
    as_moved,
    as_named,
    as_plain,
    sequences,
    time_first,
    with_noise,
    with_partners,
    words,
)
from ._models import Recurrent, TwoHeads, WithLoss, square
from ._pattern import GLOBAL_BATCH_SIZE, Pattern
from ._update import loss_of, update

LONG = 9 * GLOBAL_BATCH_SIZE + 8


def dicts(model, loader, optimizer, run):
    """`model(batch["inputs"])`."""
    for batch in loader:
        update(model, (batch["inputs"], batch["labels"]), optimizer)


def dicts_as_keywords(model, loader, optimizer, run):
    """transformers' `model(**batch).loss`, after the batch was moved key by key."""
    for batch in loader:
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def dicts_prefetched_and_moved(model, loader, optimizer, run):
    """Accelerate's DataLoaderShard: one batch ahead, to know the last; what is used is a copy."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        batch = {name: tensor.clone() for name, tensor in following.items()}
        following = next(batches, None)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def tuple_of_dicts(model, loader, optimizer, run):
    """Images and targets, as in torchvision's detection references."""
    for images, targets in loader:
        update(model, (images["image"], targets["boxes"]), optimizer)


def named_tuples(model, loader, optimizer, run):
    """A collate_fn that returns a named tuple."""
    for batch in loader:
        update(model, (batch.x, batch.y), optimizer)


def dataclasses_moved(model, loader, optimizer, run):
    """torch_geometric's `batch = batch.to(device)`: a copy, in an object of its own."""
    for batch in loader:
        batch = batch.to("cpu")
        update(model, (batch.x, batch.y), optimizer)


def dataclasses_prefetched(model, loader, optimizer, run):
    """The same with the next batch fetched before the forward."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        batch, following = following.to("cpu"), next(batches, None)
        update(model, (batch.x, batch.y), optimizer)


def objects_with_attributes(model, loader, optimizer, run):
    """A batch of a class that torch knows nothing of."""
    for batch in loader:
        update(model, (batch.features, batch.targets), optimizer)


def sequences_turned(model, loader, optimizer, run):
    """Recurrent networks: `x.transpose(0, 1)` for times before samples."""
    for x, y in loader:
        optimizer.zero_grad()
        out, _ = model(x.transpose(0, 1))
        functional.mse_loss(out, y).backward()
        optimizer.step()


def sequences_collated_time_first(model, loader, optimizer, run):
    """`pad_sequence` in a collate_fn: the first dimension of the batch is time."""
    for x, y in loader:
        optimizer.zero_grad()
        out, _ = model(x)
        functional.mse_loss(out, y).backward()
        optimizer.step()


def sequences_turned_and_prefetched(model, loader, optimizer, run):
    """Turned into memory of its own, the next batch fetched before: its samples come second."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        x, y = batch
        optimizer.zero_grad()
        with run.step(batch):
            out, _ = model(x.transpose(0, 1).contiguous())
        functional.mse_loss(out, y).backward()
        optimizer.step()


def flattened(model, loader, optimizer, run):
    """Words of all texts in one dimension: `x.flatten(0, 1)`, a view."""
    for x, y in loader:
        update(model, (x.flatten(0, 1), y.flatten(0, 1)), optimizer)


def flattened_and_prefetched(model, loader, optimizer, run):
    """The same with the next batch fetched before."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        (x, y), following = following, next(batches, None)
        update(model, (x.flatten(0, 1), y.flatten(0, 1)), optimizer)


def moved_without_blocking(model, loader, optimizer, run):
    """`pin_memory=True` and `x.to(device, non_blocking=True)`."""
    for x, y in loader:
        x, y = x.to("cpu", non_blocking=True), y.to("cpu", non_blocking=True)
        update(model, (x, y), optimizer)


def normalised_in_place(model, loader, optimizer, run):
    """`x.sub_(mean).div_(std)` on the batch itself."""
    for x, y in loader:
        x.sub_(0.1).div_(1.5)
        update(model, (x, y), optimizer)


def views_concatenated(model, loader, optimizer, run):
    """SimCLR's input: both views in one tensor, for a loss that is a mean over samples."""
    for x, noise, _ in loader:
        optimizer.zero_grad()
        first, second = model(torch.cat([x + 0.1 * noise, x - 0.1 * noise])).chunk(2)
        (functional.mse_loss(first, second) + functional.mse_loss(first, x)).backward()
        optimizer.step()


def views_concatenated_and_prefetched(model, loader, optimizer, run):
    """The same with the next batch fetched before: twice the samples of one batch, by copy."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        x, noise, _ = batch
        optimizer.zero_grad()
        with run.step(batch):
            first, second = model(torch.cat([x + 0.1 * noise, x - 0.1 * noise])).chunk(2)
        (functional.mse_loss(first, second) + functional.mse_loss(first, x)).backward()
        optimizer.step()


def many_crops(model, loader, optimizer, run):
    """DINO: a list of views, the first two in one forward, the others in a second."""
    for crops, y in loader:
        optimizer.zero_grad()
        large, small = model(torch.cat(crops[:2])), model(crops[2])
        losses = [functional.mse_loss(out, y) for out in (*large.chunk(2), small)]
        (sum(losses) / 3).backward()
        optimizer.step()


def mixed_samples(model, loader, optimizer, run):
    """mixup, with each sample's partner and share drawn by the data set."""
    for x, y, other, theirs, share in loader:
        optimizer.zero_grad()
        out = model(share * x + (1 - share) * other)
        errors = share * (out - y) ** 2 + (1 - share) * (out - theirs) ** 2
        errors.mean().backward()
        optimizer.step()


def several_outputs(model, loader, optimizer, run):
    """A model with two heads, and a loss for each."""
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        loss = functional.mse_loss(out["first"], y)
        (loss + 0.3 * functional.l1_loss(out["second"], y[:, :1])).backward()
        optimizer.step()


def seen_twice(model, loader, optimizer, run):
    """Two forwards of one batch, one backward."""
    for x, y in loader:
        optimizer.zero_grad()
        (loss_of(model, x, y) + 0.2 * loss_of(model, x.flip(1), y)).backward()
        optimizer.step()


def fed_back(model, loader, optimizer, run):
    """A rollout, `m(m(x))`, with its loss weighted by hand."""
    for x, noise, _ in loader:
        optimizer.zero_grad()
        first = model(x)
        loss = functional.mse_loss(first, noise) + functional.mse_loss(model(first), x)
        run.weight(loss).backward()
        optimizer.step()


def fed_back_by_output(model, loader, optimizer, run):
    """A rollout where the weight is at the output: it must count once."""
    for x, noise, _ in loader:
        optimizer.zero_grad()
        first = model(x)
        loss = functional.mse_loss(first, noise) + functional.mse_loss(model(first), x)
        loss.backward()
        optimizer.step()


KEYED = {"models": (WithLoss,), "data": Dicts, "count": lambda batch: len(batch["labels"])}
MOVED = {"loader": {"collate_fn": as_moved}, "count": lambda batch: len(batch.x)}
OVER_TIME = {"models": (Recurrent,), "data": sequences, "timed": False}
VIEWS = {"models": (square,), "data": with_noise}
PATTERNS = (
    Pattern(dicts, data=Dicts, count=lambda batch: len(batch["labels"])),
    Pattern(dicts_as_keywords, **KEYED),
    Pattern(dicts_prefetched_and_moved, num_samples=LONG, ahead=True, **KEYED),
    Pattern(tuple_of_dicts, data=Nested, count=lambda batch: len(batch[0]["image"])),
    Pattern(named_tuples, loader={"collate_fn": as_named}, count=lambda batch: len(batch.x)),
    Pattern(dataclasses_moved, **MOVED),
    Pattern(dataclasses_prefetched, num_samples=LONG, ahead=True, **MOVED),
    Pattern(
        objects_with_attributes,
        loader={"collate_fn": as_plain},
        count=lambda batch: len(batch.targets),
    ),
    Pattern(sequences_turned, **OVER_TIME),
    Pattern(
        sequences_collated_time_first,
        loader={"collate_fn": time_first},
        count=lambda batch: len(batch[1]),
        **OVER_TIME,
    ),
    Pattern(sequences_turned_and_prefetched, num_samples=LONG, ahead=True, **OVER_TIME),
    Pattern(flattened, data=words, timed=False),
    Pattern(flattened_and_prefetched, data=words, num_samples=LONG, ahead=True, timed=False),
    Pattern(moved_without_blocking, loader={"pin_memory": True}),
    Pattern(normalised_in_place),
    Pattern(views_concatenated, **VIEWS),
    Pattern(views_concatenated_and_prefetched, num_samples=LONG, ahead=True, **VIEWS),
    Pattern(many_crops, data=Crops, count=lambda batch: len(batch[1])),
    Pattern(mixed_samples, data=with_partners),
    Pattern(several_outputs, models=(TwoHeads,)),
    Pattern(seen_twice),
    Pattern(fed_back, weighting="loss", **VIEWS),
    Pattern(fed_back_by_output, **VIEWS),
)
