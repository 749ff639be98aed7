"""One rank's steps at two sizes in turn: of the reference, or of the user's own."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._doctor import Pace
from .._host import contents, number_of, throttled_s
from ..exceptions import invalid

Step = Callable[[int], Any]
"""Runs one step of so many samples, without talking to other ranks."""

REFERENCE = "the reference, a small convolutional network"


def reference(device: torch.device) -> Step:
    """Return forward and backward of a small convolutional network, the same on every rank.

    Args:
        device: where it computes.
    """
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 14 * 14, 128),
    ).to(device)

    @cache
    def batch(num_samples: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(num_samples)
        return torch.randn(num_samples, 3, 32, 32, generator=generator).to(device)

    def step(num_samples: int) -> None:
        model(batch(num_samples)).square().mean().backward()
        model.zero_grad()

    return step


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
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            remedy = "Give its path from the current folder."
            raise invalid("evenstep doctor --step", "name a file that is there", file, remedy)
        sys.path.insert(0, str(file.resolve().parent))  # as `python FILE` does
        place = file.stem
    module = importlib.import_module(place)
    step: Any = getattr(module, function, None)
    if not callable(step):
        rule, remedy = "name a function", f"Define `def {function}(num_samples)` in {place}."
        raise invalid("evenstep doctor --step", rule, name, remedy)
    made: Step = step
    return made


BUDGET_S = 4.0
BLOCK_S = 0.2
"""Short steps are timed several in a row: a CPU quota stops a process for up to 0.1 s, and most
steps would not notice."""
MOST_STEPS = 200


def sizes_for(global_batch_size: int, world_size: int) -> tuple[int, int]:
    """Return the sizes that are timed: a quarter of an equal share, and all of it."""
    share = max(2, global_batch_size // world_size)
    return max(1, share // 4), share


def time_steps(
    rank: int,
    load: Callable[[], Step],
    sizes: Sequence[int],
    counts: Path | None,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Pace:
    """Return what steps took, each size in turn after some of each to warm up.

    There is one measurement of each size at least, however long it takes. An error of the step
    ends it, and is reported beside what was timed before.

    Args:
        rank: the own one.
        load: returns the step.
        sizes: samples of a step.
        counts: file in which the kernel counts what a CPU quota holds back; None without one.
        budget_s: none begins after it.
        clock: in seconds.
    """
    taken: list[float] = []
    before = _look(counts, clock)
    error = ""
    try:
        step = load()
        block_s = min(BLOCK_S, budget_s / 10)
        repeats = [_repeats(step, size, clock, block_s) for size in sizes]
        before = _look(counts, clock)
        until_s = before[0] + budget_s
        while len(taken) < len(sizes) or (clock() < until_s and len(taken) < MOST_STEPS):
            at = len(taken) % len(sizes)
            taken.append(_timed(step, sizes[at], repeats[at], clock))
    except (Exception, SystemExit) as raised:  # the user's own code may raise anything
        error = f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
    used = tuple(sizes[at % len(sizes)] for at in range(len(taken)))
    after = _look(counts, clock)
    lasted_s, held_s, used_s = (new - old for new, old in zip(after, before, strict=True))
    # Held back on several CPUs at once counts several times, as does the time used there.
    share = held_s / max(lasted_s, held_s + used_s, 1e-9)
    return Pace(rank, used, tuple(taken), min(max(share, 0.0), 1.0), error)


def _look(counts: Path | None, clock: Callable[[], float]) -> tuple[float, float, float]:
    """Return the time, how long the quota held back so far, and the CPU time used so far.

    Both of the group, and on several CPUs at once the sum over them; 0 where it is unknown.
    """
    if counts is None:
        return clock(), 0.0, 0.0
    used_us = number_of(contents(counts), b"usage_usec")
    if used_us is None:  # the first version of control groups
        used_ns = contents(counts.with_name("cpuacct.usage")).strip()
        used_us = int(used_ns) // 1000 if used_ns.isdigit() else 0
    return clock(), throttled_s(counts), used_us / 1e6


def _repeats(step: Step, size: int, clock: Callable[[], float], block_s: float) -> int:
    """Return how many steps take ``block_s``, after one to warm up."""
    _timed(step, size, 1, clock)
    return max(1, math.ceil(block_s / _timed(step, size, 1, clock)))


def _timed(step: Step, size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one step, in the mean over some in a row."""
    began_s = clock()
    for _ in range(repeats):
        step(size)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # what was launched takes its time there
    return max((clock() - began_s) / repeats, 1e-9)
