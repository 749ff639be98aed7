"""A step of plain DDP, traced: the files of evenstep it passes through, and the calls."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep import Decision
from evenstep.policies import AbstractPolicy, Equal
from evenstep.torch import Balancer, Runtime

ROOT = str(Path(evenstep.__file__).parent)
FIRST, LAST = 6, 27  # steps traced: by then nothing is done for the first time


@dataclass(frozen=True)
class Walk:
    """What a step of rank 0 passes through.

    Attributes:
        files: of evenstep, on the training thread, in more than half of the steps traced (what
            other threads do for a step can fall into the next one).
        all_files: those of its other threads as well.
        calls: functions of evenstep from the engine's callback to ``policy.update``, in order;
            none on ranks other than 0.
    """

    files: frozenset[str]
    all_files: frozenset[str]
    calls: tuple[str, ...]


@final
@dataclass(frozen=True)
class Watching(AbstractPolicy[Any]):
    """Keeps equal sizes, and notes who called it."""

    stacks: Any
    name = "watching"

    def init(self, cluster: Any) -> Decision[Any]:
        return Decision(Equal().init(cluster).batch_size, None, "equal")

    def update(self, cluster: Any, timings: Any, state: Any) -> Decision[Any]:
        frame: Any = sys._getframe(1)
        calls = []
        while frame is not None:
            if is_evenstep(frame.f_code) and "testing" not in frame.f_code.co_filename:
                calls.append(name_of(frame.f_code))
            frame = frame.f_back
        self.stacks.append(tuple(reversed(calls)))
        return self.init(cluster)


def is_evenstep(code: Any) -> bool:
    """Tell whether a function is evenstep's own."""
    return code.co_filename.startswith(ROOT)


def name_of(code: Any) -> str:
    """Return a function with its file, as ``torch/_step/_conductor.py StepConductor.reduced``."""
    return f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}"


def walk(rank: int) -> Walk:
    """Trace steps of plain DDP; alone, a rank decides on its training thread."""
    torch.manual_seed(0)
    stacks: list[tuple[str, ...]] = []
    called: set[tuple[str, int, int]] = set()  # file, step, thread
    step = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and is_evenstep(frame.f_code):
            file = name_of(frame.f_code).partition(" ")[0]
            called.add((file, step, threading.get_ident()))

    threading.setprofile(note)
    sys.setprofile(note)
    data = TensorDataset(torch.randn(256, 4), torch.randint(0, 3, (256,)))
    model: Any = torch.nn.Linear(4, 3)
    with Balancer(policy=Watching(stacks), runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, DataLoader(data, batch_size=4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (inputs, labels) in enumerate(loader):
            if step == LAST:
                break
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    sys.setprofile(None)
    threading.setprofile(None)
    main = threading.get_ident()
    return Walk(
        usual({(file, at) for file, at, thread in called if thread == main}),
        usual({(file, at) for file, at, _ in called}),
        stacks[-1] if stacks else (),
    )


def usual(called: set[tuple[str, int]]) -> frozenset[str]:
    """Return the files that are called in more than half of the steps traced."""
    steps = Counter(file for file, step in called if FIRST <= step < LAST)
    return frozenset(file for file, count in steps.items() if 2 * count > LAST - FIRST)
