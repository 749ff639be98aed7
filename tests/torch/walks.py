"""One step of plain DDP, traced: the files of evenstep it passes through, and the calls."""

from __future__ import annotations

import sys
import threading
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
STEP = 6  # traced: by then nothing is done for the first time


@dataclass(frozen=True)
class Walk:
    """What one step of rank 0 passes through.

    Attributes:
        files: of evenstep, on the training thread.
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
    """Return a function with its file, as ``torch/_conductor.py StepConductor.backward_done``."""
    return f"{Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}"


def walk(rank: int) -> Walk:
    """Trace a step of plain DDP, whose decision is made on the training thread of one process."""
    torch.manual_seed(0)
    stacks: list[tuple[str, ...]] = []
    here: set[str] = set()
    everywhere: set[str] = set()
    main, active = threading.get_ident(), False

    def note(frame: Any, event: str, argument: Any) -> None:
        if active and event == "call" and is_evenstep(frame.f_code):
            name = name_of(frame.f_code).partition(" ")[0]
            everywhere.add(name)
            if threading.get_ident() == main:
                here.add(name)

    threading.setprofile(note)
    sys.setprofile(note)
    data = TensorDataset(torch.randn(96, 4), torch.randint(0, 3, (96,)))
    model: Any = torch.nn.Linear(4, 3)
    with Balancer(policy=Watching(stacks), runtime=Runtime(line_every=None)) as balancer:
        model, loader = balancer.prepare(model, DataLoader(data, batch_size=4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step, (inputs, labels) in enumerate(loader):
            active = step == STEP
            if step > STEP:
                break
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    sys.setprofile(None)
    threading.setprofile(None)
    return Walk(frozenset(here), frozenset(everywhere), stacks[-1] if stacks else ())
