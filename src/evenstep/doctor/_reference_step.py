"""What ranks are timed on: the reference, or a step of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..exceptions import invalid

Step = Callable[[int], Any]
"""Runs one step of so many samples, without talking to other ranks."""

REFERENCE = "the reference, a small convolutional network"


class Reference:
    """Forward and backward of a small convolutional network, the same on every rank.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._model = nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 14 * 14, 128),
        ).to(device)
        self._batches: dict[int, torch.Tensor] = {}

    def __call__(self, num_samples: int) -> None:
        """Run one step."""
        if num_samples not in self._batches:
            generator = torch.Generator().manual_seed(num_samples)
            drawn = torch.randn(num_samples, 3, 32, 32, generator=generator)
            self._batches[num_samples] = drawn.to(self._device)
        self._model(self._batches[num_samples]).square().mean().backward()
        self._model.zero_grad()


def check_step(name: str) -> str:
    """Return the name of a step, which has to have the right form.

    Raises:
        ValueError: it has not.
    """
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        remedy = "An example is train:step, another one train.py:step."
        raise invalid("evenstep doctor --step", "be MODULE:FUNCTION or FILE:FUNCTION", name, remedy)
    return name


def load_step(name: str) -> Step:
    """Return the function that ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION`` names.

    Raises:
        ValueError: there is no such function.
        Exception: whatever importing it raises.
    """
    place, _, function = check_step(name).rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    step: Any = getattr(module, function, None)
    if not callable(step):
        rule, remedy = "name a function", f"Define `def {function}(num_samples)` in {place}."
        raise invalid("evenstep doctor --step", rule, name, remedy)
    made: Step = step
    return made


def _from_file(file: Path) -> Any:
    name = file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        remedy = "Give its path from the current folder."
        raise invalid("evenstep doctor --step", "name a file that is there", file, remedy)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and dataclasses look it up there
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE` does, for what it imports
    spec.loader.exec_module(module)
    return module
