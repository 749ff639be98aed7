"""What each rival trains, for scripts in environments without evenstep: torch is all it needs.

Four workers train a CNN on handwritten digits. They compute in earnest, then sleep in proportion
to their samples: the first two are slow, the third is twice as fast, the fourth four times.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks._digits import cnn

WORLD_SIZE = 4
SECONDS_PER_SAMPLE = (0.01, 0.01, 0.005, 0.0025)
GLOBAL_BATCH_SIZE = 256
WARM_AFTER = 3
"""Forwards after which CPU time is counted: in the first ones torch imports much of itself."""
LEARNING_RATE, MOMENTUM = 0.05, 0.9


@dataclass(frozen=True)
class Setting:
    """What a run is told; the launcher writes it to ``setting.json``.

    Attributes:
        num_epochs: passes over the training samples.
        seed: of the first parameters and of the order of samples.
        num_train: training samples; the others are for testing.
        global_batch_size: samples of an update.
        clones: folder with clones of what no package index has; None where there is none.
    """

    num_epochs: int
    seed: int
    num_train: int
    global_batch_size: int = GLOBAL_BATCH_SIZE
    clones: str | None = None

    @property
    def num_steps(self) -> int:
        """Global batches of the run; the last one of an epoch may be smaller."""
        if self.num_train < self.global_batch_size:
            return -(-self.num_epochs * self.num_train // self.global_batch_size)
        return self.num_epochs * -(-self.num_train // self.global_batch_size)


class OnDevice(nn.Module):
    """A network on an emulated device: a forward in training ends when the device is done.

    The forward takes what the whole step would. The real arithmetic of the backward comes on top.
    """

    def __init__(self, network: nn.Module, seconds_per_sample: float) -> None:
        super().__init__()
        self.network = network
        self._seconds_per_sample = seconds_per_sample
        self.began: list[tuple[float, int]] = []
        self.warm: tuple[float, float] = (0.0, 0.0)
        self.slept_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the network's output, in due time."""
        if len(self.began) == WARM_AFTER:
            self.warm = process_time(), self.slept_s
        began_s = perf_counter()
        y: torch.Tensor = self.network(x)
        if self.training:
            self.began.append((began_s, len(x)))
            now_s = perf_counter()
            sleep(max(0.0, began_s + self._seconds_per_sample * len(x) - now_s))
            self.slept_s += perf_counter() - now_s
        return y


class Rank:
    """One worker of a run: ``script.py FOLDER RANK``.

    Everything it needs is in the folder, and so is what it leaves: ``rank0.json`` and so on.
    """

    def __init__(self) -> None:
        self.folder, self.rank = Path(sys.argv[1]), int(sys.argv[2])
        self.setting = Setting(**json.loads((self.folder / "setting.json").read_text("utf-8")))
        torch.set_num_threads(1)
        data = torch.load(self.folder / "digits.pt", weights_only=True)
        num_train = self.setting.num_train
        self.train = TensorDataset(data["x"][:num_train], data["y"][:num_train])
        self._test = data["x"][num_train:], data["y"][num_train:]

    def model(self) -> OnDevice:
        """Return the network with the parameters that every rival begins with."""
        torch.manual_seed(self.setting.seed)
        return OnDevice(cnn(), SECONDS_PER_SAMPLE[self.rank])

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return what every rival updates with; DBS has its momentum built in."""
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)

    def order(self, num_samples: int, seed: int) -> torch.Tensor:
        """Return indices of samples: epoch after epoch, each drawn anew."""
        draw = torch.Generator().manual_seed(seed)
        length = self.setting.num_train
        num_epochs = -(-num_samples // length)
        epochs = [torch.randperm(length, generator=draw) for _ in range(num_epochs)]
        return torch.cat(epochs)[:num_samples]

    def says(self, name: str, text: str) -> None:
        """Tell the other ranks."""
        partial = self.folder / f"{name}.partial"
        partial.write_text(text, "utf-8")
        os.replace(partial, self.folder / name)

    def hears(self, name: str) -> str:
        """Return what a rank told, as soon as it has."""
        while not (path := self.folder / name).exists():
            sleep(0.05)
        return path.read_text("utf-8")

    def done(self, device: OnDevice, num_updates: int) -> None:
        """Leave what was found; wait until every rank has, so that none is missed by another."""
        ended_s, cpu_s = perf_counter(), process_time() - device.warm[0]
        x, y = self._test
        device.eval()
        with torch.no_grad():
            logits = device(x)
        found = {
            "began": device.began,
            "ended_s": ended_s,
            "cpu_share": cpu_s / (device.slept_s - device.warm[1]),
            "num_updates": num_updates,
            "loss": float(cross_entropy(logits, y)),
            "accuracy": float((logits.argmax(dim=1) == y).float().mean()),
        }
        self.says(f"rank{self.rank}.json", json.dumps(found))
        for rank in range(WORLD_SIZE):
            self.hears(f"rank{rank}.json")
