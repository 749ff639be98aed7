"""What workers run whose memory is emulated: forwards of too many samples raise torch's error."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

from .models import WithBuffers
from .plans import Restless

B, NUM_STEPS, WORLD_SIZE = 48, 8, 3
QUIET = Runtime(line_every=None)


def samples():
    """Return features, targets, and each sample's own number."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B * NUM_STEPS, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(5, (len(x),), generator=generator), torch.arange(len(x)))


def alone():
    """Return the parameters that one process has after the epoch, with torch's own loader."""
    model, optimizer = _fresh()
    for x, y, _ in DataLoader(samples(), batch_size=B):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(rank, where, most, *, bounds=None, sizes=None):
    """Return parameters, the samples that counted here, forward sizes and caps after an epoch.

    Rank 0 holds ``most`` samples in the ``"forward"``, or breaks off in the ``"backward"`` of the
    first forward that has more. ``"inside"`` and ``"straight"`` fail once at a size that went well
    before, the fourth forward of ``most``: inside the model, or past it.
    """
    model, optimizer = _fresh()
    loader = DataLoader(samples(), batch_size=B // WORLD_SIZE)
    policy = Restless() if sizes is None else Fixed(sizes)
    seen, tried = [], []
    fails = Failures(where if rank == 0 else None, most, tried)
    with Balancer(B, policy=policy, bounds=bounds or Bounds(), runtime=QUIET) as balancer:
        net, loader = balancer.prepare(DistributedDataParallel(model), loader)

        def closure(batch):
            x, y, _ = batch
            tried.append(len(x))
            fails.at("forward")
            with fails.inside(model.inner):
                loss = nn.functional.cross_entropy(net(x), y)
            fails.at("late")
            fails.at("straight")
            return loss

        def through(loss):
            fails.at("backward", model)
            loss.backward()

        for step in loader.steps():
            step.backward(closure, through=through)
            seen += [
                int(n) for part in step.micro_batches if part.num_samples for n in part.batch[2]
            ]
            optimizer.step()
            optimizer.zero_grad()
        plan = balancer._session.steps.plan
        caps = None if plan.max_forward is None else plan.max_forward[0]
    return [p.detach() for p in model.parameters()], seen, tried, caps


class Failures:
    """Raises torch's error at one place of a step; nowhere where ``where`` is None."""

    def __init__(self, where, most, tried):
        self.where, self.most, self.tried, self.broken = where, most, tried, False

    def at(self, place, model=None):
        if place == self.where and self._is_due(place):
            self.broken = True
            if model is not None:  # in the middle of the backward
                list(model.parameters())[-1].grad = torch.ones(5, dtype=torch.float64)
            raise torch.OutOfMemoryError("CUDA out of memory")

    @contextmanager
    def inside(self, layer):
        """Have ``layer`` fail if the place is the middle of the model's forward."""
        handle = layer.register_forward_hook(lambda *_: self.at("inside"))
        try:
            yield
        finally:
            handle.remove()

    def _is_due(self, place):
        if place in ("inside", "straight"):
            return self.tried.count(self.most) == 4 and not self.broken
        once = place == "backward" and self.broken
        return self.tried[-1] > self.most and not once


def _fresh():
    torch.manual_seed(0)
    model = WithBuffers().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
