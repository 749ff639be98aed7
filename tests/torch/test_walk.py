"""How long the walk of one plain step is: figures that may only shrink."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep import Decision
from evenstep.policies import AbstractPolicy, Equal
from evenstep.testing import run_workers
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
    """Return a function with its file, as ``torch/_step/_conductor.py StepTracker.reduced``."""
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


# From the engine's callback to the policy; about 8 would do. A report of rank 0 is made when it is
# sent, and is a message as any other rank's: that is 5 of them.
MOST_CALLS = 15
MOST_FILES = 40  # that a step passes through, all threads together; about 15 would do


@pytest.fixture(scope="module")
def walks():
    """Rank 0's walk alone, and with another rank."""
    return {num_ranks: run_workers(num_ranks, walk)[0] for num_ranks in (1, 2)}


def test_calls_from_the_engine_to_the_policy(walks):
    """On the thread whose report is the last one."""
    calls = walks[1].calls
    print(f"{len(calls)} calls:", *calls, sep="\n  ")

    assert calls[0].endswith("Backward._finished")
    assert len(calls) <= MOST_CALLS


def test_files_that_a_step_passes_through(walks):
    """On the training thread, and on the one that talks to the other rank."""
    files = walks[2].all_files
    print(f"{len(files)} files, {len(walks[2].files)} of them on the training thread")
    print(*sorted(files), sep="\n")

    assert walks[2].files <= files
    assert len(files) <= MOST_FILES
