"""Forwards and backwards that are run to measure them, and leave no trace."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from ..._private_torch import buffers_of


@contextmanager
def kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put gradients, buffers and the random state back at the end; inside, there are no gradients.

    The random state is that of torch's default generators, numpy's and Python's own.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    grads = [parameter.grad for parameter in parameters]
    buffers = list(_buffers(modules))
    values = [buffer.clone() for _, _, buffer in buffers]
    try:
        with kept_random(parameters):
            for parameter in parameters:
                parameter.grad = None
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        with torch.no_grad():
            for (layer, name, buffer), value in zip(buffers, values, strict=True):
                buffers_of(layer)[name] = buffer  # a forward may have put another in its place
                buffer.copy_(value)


@contextmanager
def kept_random(parameters: Sequence[nn.Parameter] = ()) -> Iterator[None]:
    """Put the random state back at the end: torch's, on the parameters' devices too, and others'.

    Others are numpy's and Python's own.
    """
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield every buffer with the layer that holds it and its name there."""
    for module in modules:
        for layer in module.modules():
            for name, buffer in buffers_of(layer).items():
                if buffer is not None:
                    yield layer, name, buffer
