"""What the workers of the elastic runs train: a tiny fp64 network, a checkpoint every few steps.

Started by torchrun and killed. Beside its checkpoints it leaves ``progress.jsonl`` in its folder, a
line of rank 0 for every start and every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.torch import Balancer, Checkpoint, Drain, Runtime

GLOBAL_BATCH_SIZE = 24
NUM_SAMPLES = 24 * 20 + 7  # a short last step in every epoch
WIDTH = 16


class History:
    """Which samples made the parameters what they are: a part of the checkpoint like any other.

    Every rank notes its own; they are put together where a checkpoint is taken, so that the
    steps in between cost nothing.
    """

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}
        self._new: list[tuple[int, list[int]]] = []

    def note(self, step: int, samples: torch.Tensor) -> None:
        """Note that this rank computed these samples of ``step``."""
        self._new.append((step, samples.tolist()))

    def gather(self) -> None:
        """Put together what the ranks noted. Collective."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self._new)
        for step, samples in (entry for entries in everybody for entry in entries):
            self.steps.setdefault(step, []).extend(samples)
        self._new = []

    def state_dict(self) -> dict[str, Any]:
        """Return the samples of every step."""
        return {"steps": {step: list(samples) for step, samples in self.steps.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.steps = state["steps"]


def make_data() -> TensorDataset:
    """Return inputs, targets and the index of every sample."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(NUM_SAMPLES, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, y, torch.arange(NUM_SAMPLES))


def make_model() -> nn.Module:
    """Return a small network in fp64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1)).double()


class Diary:
    """Says what happens when, for whoever watches.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self._is_first = dist.get_rank() == 0
        self._file = (folder / "progress.jsonl").open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        """Write a line, if this is rank 0."""
        if self._is_first:
            self._file.write(json.dumps({"time_s": time.time(), **facts}) + "\n")

    def started(self, step: int) -> None:
        """Say that a start succeeded: from which step, which processes, and which agents' own."""
        pids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pids, (os.getpid(), os.getppid()))
        self.write(started=step, pids=pids)


def main() -> None:
    """Train to the end, from wherever the last checkpoint stands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=7, help="steps between two checkpoints")
    parser.add_argument("--pause-s", type=float, default=0.0, help="what a step takes beside")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is no garbage: looking through it at the end takes 0.5 s
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(options)
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """Train, and save the parameters at the end."""
    model, history, diary = make_model(), History(), Diary(options.folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stock = DataLoader(
        make_data(),
        batch_size=-(-GLOBAL_BATCH_SIZE // dist.get_world_size()),
        shuffle=True,
        generator=torch.Generator().manual_seed(2),
    )
    with (
        Balancer(GLOBAL_BATCH_SIZE, runtime=Runtime(line_every=None)) as balancer,
        Drain(balancer) as drain,
    ):
        wrapped, loader = balancer.prepare(DistributedDataParallel(model), stock)
        checkpoint = Checkpoint(
            options.folder / "checkpoints",
            model=wrapped,
            optimizer=optimizer,
            loader=loader,
            balancer=balancer,
            others={"history": history},
        )
        step = checkpoint.load() or 0
        diary.started(step)
        while step < options.steps and not drain.requested:
            for x, y, index in loader:
                nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                history.note(step, index[: balancer.num_samples])
                time.sleep(options.pause_s)
                step += 1
                diary.write(step=step)
                if step % options.every == 0 or step == options.steps or drain.requested:
                    history.gather()
                    checkpoint.save(step)
                if step == options.steps or drain.requested:
                    break
    if step == options.steps and dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), **history.state_dict()}, options.folder / "end.pt")


if __name__ == "__main__":
    main()
