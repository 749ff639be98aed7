"""Loops that differ in what they do within a step, and around it."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from ._data import pairs
from ._models import Checkpointed, compiled
from ._pattern import GLOBAL_BATCH_SIZE, Pattern
from ._update import loss_of, update


def loss_logged_before_backward(model, loader, optimizer, run):
    """The loss is summed over ranks for a log, between forward and backward."""
    for x, y in loader:
        loss = loss_of(model, x, y)
        run.all_reduce(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def loss_logged_after_backward(model, loader, optimizer, run):
    """The mean loss over all samples, for a log, after the update."""
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        run.mean(loss.detach())


def step_in_a_function(model, loader, optimizer, run):
    """A function for the step and another for the loss, the batch in a closure."""

    def train_step(batch):
        def closure():
            x, y = batch
            return functional.mse_loss(model(x), y)

        optimizer.zero_grad()
        loss = closure()
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [train_step(batch) for batch in loader]
    assert len(losses) == len(loader)


def batch_skipped_on_all_ranks(model, loader, optimizer, run):
    """`continue` before the forward, by a decision that all ranks share."""
    for number, batch in enumerate(loader):
        if number == 1:
            continue
        update(model, batch, optimizer)


def batch_skipped_after_the_forward(model, loader, optimizer, run):
    """`continue` between forward and backward, by a loss that all ranks have summed."""
    for number, (x, y) in enumerate(loader):
        loss = loss_of(model, x, y)
        worst = run.all_reduce(loss.detach())
        if number == 1 and torch.isfinite(worst):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def update_skipped_on_all_ranks(model, loader, optimizer, run):
    """A step whose gradient is thrown away everywhere."""
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if number != 2:
            optimizer.step()


def line_search(model, loader, optimizer, run):
    """LBFGS: the optimizer calls a closure with forward and backward, several times a batch."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return run.mean(loss.detach())

        optimizer.step(closure)


def learning_rate_finder(model, loader, optimizer, run):
    """A few batches at growing rates, the weights restored, then training."""
    state = copy.deepcopy(model.state_dict())
    for (x, y), rate in zip(loader, (1e-3, 1e-2, 1e-1), strict=False):
        update(model, (x, y), torch.optim.SGD(model.parameters(), lr=rate))
    model.load_state_dict(state)
    for batch in loader:
        update(model, batch, optimizer)


def learning_rate_finder_on_a_copy(model, loader, optimizer, run):
    """The same on a copy with a loader of its own, which nobody balances."""
    tried = copy.deepcopy(getattr(model, "module", model))
    search = torch.optim.SGD(tried.parameters(), lr=1e-3)
    for batch in DataLoader(pairs(GLOBAL_BATCH_SIZE), batch_size=4):
        update(tried, batch, search)
    for batch in loader:
        update(model, batch, optimizer)


def activations_computed_again(model, loader, optimizer, run):
    """Activation checkpointing inside the model."""
    for batch in loader:
        update(model, batch, optimizer)


def gradients_scaled_and_clipped(model, loader, optimizer, run):
    """GradScaler, then clipping by the norm of the unscaled gradient."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def evaluated_in_between(model, loader, optimizer, run):
    """`model.eval()`, forwards without gradients over held-out data, `model.train()`."""
    held_out = DataLoader(pairs(10), batch_size=4)
    for batch in loader:
        update(model, batch, optimizer)
        model.eval()
        with torch.no_grad():
            for x, _ in held_out:
                getattr(model, "module", model)(x)
        model.train()


def validation_shared_out(model, loader, optimizer, run):
    """A validation after each epoch, over a loader of `prepare_eval`."""
    validation = run.evaluation(DataLoader(pairs(30), batch_size=4))
    for _ in range(2):
        for batch in loader:
            update(model, batch, optimizer)
        model.eval()
        with torch.no_grad():
            for x, y in validation:
                loss_of(model, x, y)
        model.train()


def accuracy_before_the_update(model, loader, optimizer, run):
    """`model.eval()` and a forward of the batch without `no_grad`, for a log."""
    for x, y in loader:
        model.eval()
        loss_of(model, x, y).item()
        model.train()
        update(model, (x, y), optimizer)


def accuracy_after_the_update(model, loader, optimizer, run):
    """A second forward of the batch, without gradients, after the update."""
    for x, y in loader:
        update(model, (x, y), optimizer)
        with torch.no_grad():
            loss_of(model, x, y).item()


def gradients_accumulated_over_an_epoch(model, loader, optimizer, run):
    """Gradient norms of an epoch without an update: none steps until the end."""
    optimizer.zero_grad()
    for x, y in loader:
        (loss_of(model, x, y) / len(loader)).backward()
    optimizer.step()


def stopped_early(model, loader, optimizer, run):
    """Training ends in the middle of an epoch, once the mean loss of all ranks says so."""
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        if run.mean(loss.detach()) > 0 and number == 3:
            break


def rates_scheduled(model, loader, optimizer, run):
    """A schedule counted in `len(loader)`, stepped after each update."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * len(loader))
    for _ in range(2):
        for batch in loader:
            update(model, batch, optimizer)
            schedule.step()


def model_compiled(model, loader, optimizer, run):
    """`torch.compile` before DDP."""
    for batch in loader:
        update(model, batch, optimizer)


def features_collected(model, loader, optimizer, run):
    """A forward hook of the script's own keeps features, on which there is a second loss."""
    features = []
    online = getattr(model, "module", model)
    handle = online[1].register_forward_hook(lambda module, given, out: features.append(out))
    for x, y in loader:
        features.clear()
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        run.weight(loss + 0.1 * features[0].pow(2).mean()).backward()
        optimizer.step()
    handle.remove()


def penalised_weights(model, loader, optimizer, run):
    """A penalty on the weights themselves, added to the loss."""
    for x, y in loader:
        optimizer.zero_grad()
        penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
        (loss_of(model, x, y) + 0.01 * penalty).backward()
        optimizer.step()


PATTERNS = (
    Pattern(loss_logged_before_backward),
    Pattern(loss_logged_after_backward),
    Pattern(step_in_a_function),
    Pattern(batch_skipped_on_all_ranks),
    Pattern(batch_skipped_after_the_forward),
    Pattern(update_skipped_on_all_ranks),
    Pattern(line_search, timed=False),
    Pattern(learning_rate_finder),
    Pattern(learning_rate_finder_on_a_copy),
    Pattern(activations_computed_again, models=(Checkpointed,)),
    Pattern(gradients_scaled_and_clipped),
    Pattern(evaluated_in_between),
    Pattern(validation_shared_out),
    Pattern(accuracy_before_the_update),
    Pattern(accuracy_after_the_update),
    Pattern(gradients_accumulated_over_an_epoch),
    Pattern(stopped_early, timed=False),
    Pattern(rates_scheduled, loader={"shuffle": True}),
    Pattern(model_compiled, models=(compiled,), timed=False),
    Pattern(features_collected, weighting="loss"),
    Pattern(penalised_weights),
)
