"""A classifier of digits whose workers average their gradients by any means."""

from __future__ import annotations

from hashlib import sha256
from time import monotonic, sleep
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks._digits import shuffled_digits
from benchmarks._network_arena import Arena, Work, mean_of

NUM_PIXELS, NUM_CLASSES = 64, 10
BATCH_SIZE = 4  # of a worker: little, as seven processes share two cores
CHECKED_EVERY = 8  # steps
LEARNING_RATE = 0.02


@final
class Classifier(Work):
    """A network with one hidden layer that is as wide as the gradients are long.

    Args:
        arena: whose workers train it, each on its own part of the samples.
        compute_s: a gradient takes this long; what is left of it is slept.
    """

    def __init__(self, arena: Arena, compute_s: float) -> None:
        self._rank, self._workers, self._compute_s = arena.rank, arena.workers, compute_s
        per_unit = NUM_PIXELS + 1 + NUM_CLASSES
        width = (arena.num_elements - NUM_CLASSES) // per_unit
        torch.manual_seed(0)
        self._model = nn.Sequential(
            nn.Linear(NUM_PIXELS, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES)
        )
        self._left = arena.num_elements - (width * per_unit + NUM_CLASSES)
        self._x, self._y = shuffled_digits()
        self._step = 0
        self._before: Tensor | None = None

    def compute(self, gradient: Tensor) -> None:
        end_s = monotonic() + self._compute_s
        gradient.copy_(self._gradient(self._rank))
        sleep(max(end_s - monotonic(), 0.0))

    def update(self, mean: Tensor) -> None:
        self._before = parameters_to_vector(self._model.parameters()).detach()
        after = self._before - LEARNING_RATE * mean[: len(self._before)]
        vector_to_parameters(after, self._model.parameters())
        self._step += 1

    def mean(self) -> Tensor | None:
        """Return it as computed here, of the same parameters, for all workers one by one."""
        if self._step % CHECKED_EVERY or self._before is None:
            return None
        after = parameters_to_vector(self._model.parameters()).detach()
        vector_to_parameters(self._before, self._model.parameters())
        self._step -= 1
        terms = [self._gradient(worker) for worker in self._workers]
        self._step += 1
        vector_to_parameters(after, self._model.parameters())
        return mean_of(terms)

    def digest(self) -> str:
        """Return what tells other parameters from these."""
        flat = parameters_to_vector(self._model.parameters()).detach()
        return sha256(flat.numpy().tobytes()).hexdigest() if flat.isfinite().all() else "not finite"

    def _gradient(self, worker: int) -> Tensor:
        """Return a worker's gradient in this step."""
        first = (self._step * len(self._workers) + worker) * BATCH_SIZE
        rows = torch.arange(first, first + BATCH_SIZE) % len(self._x)
        self._model.zero_grad()
        out = self._model(self._x[rows].flatten(1))
        nn.functional.cross_entropy(out, self._y[rows]).backward()  # type: ignore[no-untyped-call]
        grads = [parameter.grad for parameter in self._model.parameters()]
        found = [grad.flatten() for grad in grads if grad is not None]
        return torch.cat([*found, torch.zeros(self._left)])
