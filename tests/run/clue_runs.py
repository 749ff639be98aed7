"""Balanced runs in which one rank keeps the others waiting by what only a clue can tell."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from evenstep._host import HostReader
from evenstep._run._clue_reader import ClueReader
from evenstep.events import WaitingDiagnosed
from evenstep.torch import Balancer, Runtime

LATE = 1  # the rank


class Texts(torch.utils.data.Dataset[torch.Tensor]):
    """So many samples, all as long or each of another length."""

    def __init__(self, num_samples: int, *, is_unlike: bool) -> None:
        lengths = torch.randint(50, 1000, (num_samples,)) if is_unlike else [500] * num_samples
        self.lengths = [int(length) for length in lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(self.lengths[index], dtype=torch.int64)


class Slow(torch.nn.Module):
    """A layer that takes a while for each token, on ``LATE`` longer where it waits for a core."""

    def __init__(self, waits_s: float, file: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.waits_s, self.file = waits_s, file
        self.delay_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(1e-5 * x.numel() + self.waits_s)
        if self.waits_s:
            self.delay_s += self.waits_s
            self.file.write_text(f"1 {round(self.delay_s * 1e9)} 1\n")
        return self.layer(x[:, :4].float())


def nested_run(rank: int, num_steps: int) -> int:
    """Train on tensors whose sizes torch does not tell; return how many steps there were."""
    torch.manual_seed(0)
    texts = [torch.randn(1 + index % 5, 4) for index in range(8 * num_steps)]
    data = DataLoader(texts, batch_size=4, collate_fn=torch.nested.nested_tensor)
    number = 0
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(Rows(), data)
        for x in loader:
            model(x).square().mean().backward()
            number += 1
    return number


class Rows(torch.nn.Module):
    """A layer for each text by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(text).mean() for text in x.unbind()])


def diagnosed_run(rank: int, folder: str, kind: str, num_steps: int) -> list[WaitingDiagnosed]:
    """Return what is said of a run of so many steps: of its causes, on rank 0.

    Args:
        rank: this process.
        folder: where each rank has a root of its own, for the files that Linux has.
        kind: of trouble: ``"garbage"``, ``"busy"`` or ``"lengths"``; anything else is none.
        num_steps: in the run.
    """
    torch.manual_seed(0)
    root = Path(folder) / str(rank)
    schedule = root / f"proc/self/task/{threading.get_native_id()}/schedstat"
    schedule.parent.mkdir(parents=True)
    schedule.write_text("1 0 1\n")
    is_late = rank == LATE
    gc.freeze()  # what torch has made is not looked through each time
    junk: Any = [{"n": [n]} for n in range(100_000 * (is_late and kind == "garbage"))]
    heard: list[Any] = []
    runtime = Runtime(line_every=None, hooks=(heard.append,))
    texts = Texts(8 * num_steps, is_unlike=kind == "lengths")
    data = DataLoader(texts, batch_size=4, collate_fn=partial(pad_sequence, batch_first=True))
    model: Any = Slow(0.015 * (is_late and kind == "busy"), schedule)
    with Balancer(policy="equal", runtime=runtime) as balancer:
        # Files of the test's own, looked at ten times a second.
        balancer._parts.clues = partial(
            ClueReader, host=partial(HostReader, root=root), now=lambda: 10 * monotonic()
        )
        model, loader = balancer.prepare(model, data)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if junk:
                gc.collect()
    return [event for event in heard if isinstance(event, WaitingDiagnosed)]
