"""Cells of one process: time and memory by batch size and length, and what models say of them.

The time is that of forward and backward, on the device, as evenstep takes it. The optimizer's step
follows each one, untimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks._common import progress
from benchmarks._gpu_device import (
    NotRun,
    autocast,
    facts,
    peak_bytes,
    precisions,
    reset_peak,
    spread,
    synchronize,
    timed,
)
from benchmarks._gpu_fits import cost_errors, fit_errors, memory_errors
from benchmarks._gpu_models import Workload, gpt, resnet
from evenstep.torch._memory._retries import free_memory, is_out_of_memory

SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 384, 512)
SMALL_SIZES = (1, 2, 3, 4, 6, 8, 9, 12, 16)
LENGTHS, SMALL_LENGTHS = (64, 128, 256, 512, 1024), (8, 16, 32)
LEAST_SIZES = 6  # of a curve that time models are fitted to
LONGEST_S = 0.4  # of a step: no larger size is timed

Made = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Effort:
    """How much is timed.

    Attributes:
        small: whether models and sizes are small.
        rounds: visits to each size, the first in ascending order and the others in a random one.
        steps: timed steps of each visit.
        warm_up: steps before the first visit's.
    """

    small: bool
    rounds: int
    steps: int
    warm_up: int = 3


def machine(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return what the figures depend on."""
    return facts(device)


def resnet_curve(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return t(b) and memory of a ResNet."""
    return _curves(resnet(small=effort.small), device, effort)


def gpt_curve(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return t(b) and memory of a GPT."""
    return _curves(gpt(small=effort.small), device, effort)


def gpt_lengths(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return t(b, L) of a GPT on sequences of one length, and what a model by cost says of it."""
    lengths = SMALL_LENGTHS if effort.small else LENGTHS
    sizes = (1, 2, 4, 8) if effort.small else (1, 2, 4, 8, 16, 32, 64)
    cells = []
    for length in lengths:
        progress(f"t(b, L) of the GPT, L = {length}")
        workload = gpt(small=effort.small, length=length)
        found = curve(workload, device, effort, sizes, precisions(device)[-1])
        for size, seconds, peak in zip(
            found["sizes"], found["seconds"], found["peak_bytes"], strict=True
        ):
            cells.append({"size": size, "length": length, "seconds": seconds, "peak_bytes": peak})
    errors = cost_errors(
        [cell["size"] for cell in cells],
        [cell["length"] for cell in cells],
        [cell["seconds"]["median"] for cell in cells],
    )
    return {"precision": precisions(device)[-1], "cells": cells, "errors": errors} | {
        "headline": {name: one["median"] for name, one in errors.items()}
    }


def compiled(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return the time of eager and compiled steps of a GPT, at the same sizes."""
    ways: dict[str, Made] = {"eager": lambda model: model, "compiled": torch.compile}
    if device.type == "cuda":
        ways["reduce-overhead"] = lambda model: torch.compile(model, mode="reduce-overhead")
    workload, precision = gpt(small=effort.small), precisions(device)[-1]
    found: dict[str, Any] = {"model": workload.told, "precision": precision}
    for name, way in ways.items():
        progress(name)
        torch.compiler.reset()
        found[name] = curve(workload, device, effort, _few_sizes(effort), precision, way)
    over = {f"{name} over eager": _over(found[name], found["eager"]) for name in [*ways][1:]}
    return found | {"headline": over}


def graph(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return the time of forward and backward of a GPT as one CUDA graph, beside eager steps."""
    if device.type != "cuda":
        raise NotRun(f"CUDA graphs are for CUDA, and this is {device.type}")
    workload, precision = gpt(small=effort.small), precisions(device)[-1]
    eager = curve(workload, device, effort, _few_sizes(effort), precision)
    sizes = eager["sizes"]
    captured = {
        "sizes": sizes,
        "seconds": [_captured(workload, device, effort, size, precision) for size in sizes],
    }
    return {
        "model": workload.told,
        "precision": precision,
        "eager": eager,
        "graph": captured,
        "headline": {"graph over eager": _over(captured, eager)},
    }


def _few_sizes(effort: Effort) -> tuple[int, ...]:
    return (4,) if effort.small else (1, 4, 16, 64)


def _over(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of medians, by size."""
    other_s = dict(zip(other["sizes"], other["seconds"], strict=True))
    return {
        str(size): seconds["median"] / other_s[size]["median"]
        for size, seconds in zip(one["sizes"], one["seconds"], strict=True)
        if size in other_s
    }


def _captured(
    workload: Workload, device: torch.device, effort: Effort, size: int, precision: str
) -> dict[str, float]:
    """Return the seconds of replays of a graph."""
    torch.manual_seed(0)
    model = workload.make().to(device)
    batch = tuple(one.to(device) for one in workload.batch(size))

    def forward_and_backward() -> None:
        with autocast(device, precision):
            loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # as torch's notes on CUDA graphs want it
        for _ in range(effort.warm_up):
            forward_and_backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(aside)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        forward_and_backward()
    return spread(timed(captured.replay, device, effort.rounds * effort.steps))


def _curves(workload: Workload, device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return t(b) and memory in each precision, with what models say of them."""
    found: dict[str, Any] = {"model": workload.told}
    sizes, headline = SMALL_SIZES if effort.small else SIZES, {}
    for precision in precisions(device):
        progress(f"t(b) of {workload.told}, {precision}")
        one = found[precision] = curve(workload, device, effort, sizes, precision)
        medians = [seconds["median"] for seconds in one["seconds"]]
        if len(medians) < LEAST_SIZES:
            raise NotRun(f"not {LEAST_SIZES} sizes of {workload.told} fit and take {LONGEST_S:g} s")
        one["fits"] = fit_errors(one["sizes"], medians)
        one["memory"] = memory_errors(one["sizes"], one["peak_bytes"])
        headline[precision] = {name: one["fits"][name]["between"]["median"] for name in one["fits"]}
    return found | {"headline": headline}


def curve(
    workload: Workload,
    device: torch.device,
    effort: Effort,
    sizes: Sequence[int],
    precision: str,
    way: Made = lambda model: model,
) -> dict[str, Any]:
    """Return seconds and peaks of memory by batch size, up to what fits and is not too long.

    Args:
        workload: what is trained.
        device: where.
        effort: how much is timed.
        sizes: ascending.
        precision: of the forward.
        way: from the model to what is called in its place.

    Returns:
        Beside them, ``warm_up_s`` is the wall time of the first steps at each size, compilation
        included, and ``out_of_memory`` the size that did not fit.

    Raises:
        NotRun: no size fits.
    """
    torch.manual_seed(0)
    trainer, rng = Trainer(workload, device, precision, way), np.random.default_rng(0)
    visits, too_large = _ascending(trainer, device, effort, sizes)
    trainer.forget()
    if not visits:
        raise NotRun(f"not one sample of {workload.told} fits")
    for _ in range(effort.rounds - 1):
        for size in rng.permutation([*visits]).tolist():
            trainer.steps(size, 1)  # what was freed for another size is asked for once more
            visits[size].seconds.extend(trainer.steps(size, effort.steps))
    return {
        "sizes": [*visits],
        "seconds": [spread(each.seconds) for each in visits.values()],
        "warm_up_s": [each.warm_up_s for each in visits.values()],
        "peak_bytes": [each.peak_bytes for each in visits.values()],
        "out_of_memory": too_large,
        "num_parameters": trainer.num_parameters,
    }


@dataclass(frozen=True)
class Visit:
    """What was measured at a size: see ``curve``."""

    warm_up_s: float
    seconds: list[float]
    peak_bytes: int


def _ascending(
    trainer: Trainer, device: torch.device, effort: Effort, sizes: Sequence[int]
) -> tuple[dict[int, Visit], int | None]:
    """Return the first visits, and the size that did not fit."""
    visits: dict[int, Visit] = {}
    for size in sizes:
        began_s = perf_counter()
        try:
            trainer.steps(size, effort.warm_up)
            warm_up_s = perf_counter() - began_s
            reset_peak(device)
            seconds = trainer.steps(size, effort.steps)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return visits, size
        visits[size] = Visit(warm_up_s, seconds, peak_bytes(device))
        if float(np.median(seconds)) > LONGEST_S:
            break
    return visits, None


class Trainer:
    """A model on a device with its optimizer.

    Args:
        workload: the model.
        device: where it is trained.
        precision: of its forward.
        way: from the model to what is called in its place.
    """

    def __init__(self, workload: Workload, device: torch.device, precision: str, way: Made) -> None:
        model = workload.make().to(device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._called: Any = way(model)
        self._optimizer = torch.optim.AdamW(model.parameters())
        self._workload, self._device, self._precision = workload, device, precision

    def steps(self, size: int, num_steps: int) -> list[float]:
        """Return the seconds of so many steps on one batch."""
        batch = tuple(one.to(self._device) for one in self._workload.batch(size))

        def forward_and_backward() -> None:
            with autocast(self._device, self._precision):
                loss = self._workload.loss(self._called, batch)
            loss.backward()  # type: ignore[no-untyped-call]

        def update() -> None:
            self._optimizer.step()
            self._optimizer.zero_grad()

        return timed(forward_and_backward, self._device, num_steps, after=update)

    def forget(self) -> None:
        """Give back what a step that did not fit has left."""
        self._optimizer.zero_grad()
        free_memory()
        synchronize(self._device)
