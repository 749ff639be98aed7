"""Loops with several forwards and backwards for each update."""

from __future__ import annotations

from itertools import islice

import torch
from torch.utils.data import DataLoader

from evenstep.torch import Bounds

from ._data import sequences, with_groups
from ._models import Recurrent
from ._pattern import GLOBAL_BATCH_SIZE, Pattern
from ._update import loss_of, update
from .fetching import one_behind

LONG = 7 * GLOBAL_BATCH_SIZE + 8
SMALL = Bounds(max=5)


def accumulation(model, loader, optimizer, run):
    """Gradients of two batches add up under `no_sync`, each loss divided by two."""
    for number, (x, y) in enumerate(loader):
        last = number % 2 == 1
        with run.no_sync(model, unless=last):
            (loss_of(model, x, y) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_with_a_remainder(model, loader, optimizer, run):
    """`(i + 1) % 3 == 0 or i + 1 == len(loader)`, as in Accelerate."""
    for number, (x, y) in enumerate(loader, 1):
        last = number % 3 == 0 or number == len(loader)
        with run.no_sync(model, unless=last):
            (loss_of(model, x, y) / 3).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_without_no_sync(model, loader, optimizer, run):
    """The same where nobody thought of `no_sync`: every backward reduces what there is."""
    for number, (x, y) in enumerate(loader):
        (loss_of(model, x, y) / 2).backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_of_batches_fetched_together(model, loader, optimizer, run):
    """The Trainer's `get_batch_samples`: all batches of an update are fetched before the first."""
    batches = iter(loader)
    while together := list(islice(batches, 3)):
        for batch in together[:-1]:
            with run.no_sync(model):
                (loss_of(model, *batch) / len(together)).backward()
        (loss_of(model, *together[-1]) / len(together)).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulation_in_nanogpts_order(model, loader, optimizer, run):
    """nanoGPT with accumulation: fetches between forward and backward, reduces in the last."""
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        for micro_step in range(2):
            if batch is None:
                break
            with run.no_sync(model, unless=micro_step == 1):
                loss = loss_of(model, *batch) / 2
                batch = next(batches, None)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulation_in_timms_order(model, loader, optimizer, run):
    """timm's train.py: a loader around the loader, a last update of what is left, validation."""
    number_left = len(loader) % 3
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(one_behind(loader), 1):
            last = number % 3 == 0 or number == len(loader)
            together = number_left if number > len(loader) - number_left else 3
            with run.no_sync(model, unless=last):
                (loss_of(model, x, y) / together).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            for x, y in DataLoader(loader.dataset, batch_size=GLOBAL_BATCH_SIZE):
                loss_of(model, x, y)


def micro_batches_of_steps(model, loader, optimizer, run):
    """`loader.steps()`: as few micro-batches as fit."""
    for step in run.steps(loader):
        optimizer.zero_grad()
        for x, y in step:
            loss_of(model, x, y).backward()
        optimizer.step()


def steps_prefetched_by_one(model, loader, optimizer, run):
    """`loader.steps()`, the next step fetched before the one at hand is used."""
    steps = run.steps(loader)
    following = next(steps)
    while following is not None:
        step, following = following, next(steps, None)
        optimizer.zero_grad()
        for x, y in step:
            loss_of(model, x, y).backward()
        optimizer.step()


def accumulation_over_steps(model, loader, optimizer, run):
    """`loader.steps()` with two global batches for each update."""
    for number, step in enumerate(run.steps(loader)):
        with run.no_sync(model, unless=number % 2 == 1):
            for x, y in step:
                (loss_of(model, x, y) / 2).backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def chunks_of_the_batch(model, loader, optimizer, run):
    """The batch goes through in two chunks, each loss times its share of the samples."""
    for x, y in loader:
        optimizer.zero_grad()
        parts = list(zip(x.chunk(2), y.chunk(2), strict=True))
        for index, (part, target) in enumerate(parts):
            with run.no_sync(model, unless=index == len(parts) - 1):
                (loss_of(model, part, target) * (len(part) / len(x))).backward()
        optimizer.step()


def splits_of_one_size(model, loader, optimizer, run):
    """The batch is split by three samples: ranks have other numbers of forwards."""
    for x, y in loader:
        optimizer.zero_grad()
        parts = list(zip(x.split(3), y.split(3), strict=True))
        for index, (part, target) in enumerate(parts):
            with run.no_sync(model, unless=index == len(parts) - 1):
                (loss_of(model, part, target) * (len(part) / len(x))).backward()
        optimizer.step()


def two_backwards(model, loader, optimizer, run):
    """Two forwards with a backward each before one update."""
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        (0.1 * loss_of(model, x.flip(1), y)).backward()
        optimizer.step()


def graph_retained(model, loader, optimizer, run):
    """Two losses of one forward, each with its backward under `no_sync` but for a last forward."""
    for x, y in loader:
        optimizer.zero_grad()
        with run.no_sync(model):
            out = model(x)
            ((out - y) ** 2).mean().backward(retain_graph=True)
            (0.1 * out.abs().mean()).backward()
        (0.5 * loss_of(model, x, y)).backward()
        optimizer.step()


def many_epochs_over_one_batch(model, loader, optimizer, run):
    """PPO: several passes over each batch, by minibatches of its indices."""
    for x, y, group in loader:
        for _ in range(2):
            for minibatch in range(3):
                index = (group == minibatch).nonzero()[:, 0]
                optimizer.zero_grad()
                errors = ((model(x[index]) - y[index]) ** 2).mean(1)
                (errors.sum() / len(x)).backward()
                optimizer.step()


def backpropagation_through_time(model, loader, optimizer, run):
    """Truncated: an update after every two times of the sequences, the state carried on."""
    for x, y in loader:
        state = None
        for part in x.transpose(0, 1).split(2):
            optimizer.zero_grad()
            out, state = model(part, state)
            ((out - y) ** 2).mean().backward()
            optimizer.step()
            state = state.detach()


def sharpness_aware(model, loader, optimizer, run):
    """SAM: a second forward and backward at weights a step up the gradient."""
    parameters = list(model.parameters())
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        ups = [0.05 * parameter.grad / norm for parameter in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, ups)
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, ups)
        optimizer.step()


def replayed_beside_the_batch(model, loader, optimizer, run):
    """Experience replay: each forward has this batch and the one before in one tensor."""
    before = None
    for x, y in loader:
        both = (x, y) if before is None else (torch.cat([x, before[0]]), torch.cat([y, before[1]]))
        update(model, both, optimizer)
        before = x, y


PATTERNS = (
    Pattern(accumulation, num_samples=LONG),
    Pattern(accumulation_with_a_remainder, num_samples=LONG),
    Pattern(accumulation_without_no_sync, num_samples=LONG),
    Pattern(accumulation_of_batches_fetched_together, num_samples=LONG, ahead=True),
    Pattern(accumulation_in_nanogpts_order, num_samples=LONG, ahead=True),
    Pattern(
        accumulation_in_timms_order,
        loader={"drop_last": True},
        num_samples=8 * GLOBAL_BATCH_SIZE + 8,
        remedy="step(",  # two batches in use, one of which is like two or three views of the other
        ahead=True,
    ),
    Pattern(micro_batches_of_steps, bounds=SMALL),
    Pattern(steps_prefetched_by_one, bounds=SMALL, num_samples=LONG, ahead=True),
    Pattern(accumulation_over_steps, bounds=SMALL, num_samples=LONG),
    Pattern(chunks_of_the_batch),
    Pattern(splits_of_one_size, timed=False),
    Pattern(two_backwards),
    Pattern(graph_retained),
    Pattern(many_epochs_over_one_batch, data=with_groups),
    Pattern(backpropagation_through_time, models=(Recurrent,), data=sequences, timed=False),
    Pattern(sharpness_aware),
    Pattern(replayed_beside_the_batch, remedy="step(", timed=False),
)
