"""Cells on single steps: how late measurements are, and whether sums are exact."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks._common import progress
from benchmarks._gpu_device import Effort, NotRun, has_doubles, synchronize
from benchmarks._gpu_models import beside_a_cpu, gpt
from benchmarks._gpu_ranks import QUIET, Place, loader_of, moved, run_at, spread_over
from evenstep import Cluster, Decision, StepTimings
from evenstep.policies import AbstractPolicy
from evenstep.torch import Balancer

WARM_UP = 5  # steps that are not looked at
EXACT = 1e-9  # as in the tests

Freshness = Literal["newest", "exact"]


@final
@dataclass(frozen=True)
class Numbered(AbstractPolicy[int]):
    """New sizes after every update, by which each plan is known: rank 0 gets one sample more.

    Attributes:
        measured: by the number of a plan, rank 0's size in the step that it was decided on.
    """

    measured: dict[int, int] = field(default_factory=dict)
    name = "numbered"

    def init(self, cluster: Cluster) -> Decision[int]:
        return self._planned(cluster, 0)

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        self.measured[state + 1] = int(timings.batch_size[0])
        return self._planned(cluster, state + 1)

    def _planned(self, cluster: Cluster, number: int) -> Decision[int]:
        sizes = np.ones(cluster.world_size, np.int64)
        sizes[0] = first_size(number, cluster.global_batch_size, cluster.world_size)
        sizes[-1] += cluster.global_batch_size - sizes.sum()
        return Decision(sizes, number, reason=f"number {number}")


def first_size(number: int, global_batch_size: int, world_size: int) -> int:
    """Return rank 0's samples in a plan of ``Numbered``; all of them where it is alone."""
    if world_size == 1:
        return global_batch_size
    return 1 + number % (global_batch_size - world_size + 1)


def lateness(
    sizes: Sequence[int], measured: Mapping[int, int], global_batch_size: int, world_size: int
) -> Counter[int]:
    """Return how many steps after the newest measurement that its plan knows of each step was.

    1 is the least: step k decides k + 1. Steps whose plan was made before any measurement are
    left out.

    Args:
        sizes: rank 0's in every step.
        measured: of ``Numbered``.
        global_batch_size: samples of a step.
        world_size: number of ranks, at least 2.
    """
    found: Counter[int] = Counter()
    for step in range(WARM_UP, len(sizes)):
        plans = [
            number
            for number in measured
            if number <= step and first_size(number, global_batch_size, world_size) == sizes[step]
        ]
        before = [k for k in range(step) if plans and sizes[k] == measured[max(plans)]]
        if before:
            found[step - before[-1]] += 1
    return found


@contextmanager
def watched(device: torch.device) -> Iterator[list[str]]:
    """Yield a list that at the end says where the host waited for CUDA; elsewhere nothing tells."""
    waits: list[str] = []
    if device.type != "cuda":
        yield waits
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one in caught:
        where = f"{Path(one.filename).name}:{one.lineno}: {one.message}"
        if "synchronizing" in where:
            waits.append(where)
        else:
            print(where, file=sys.stderr)


def late(
    rank: int, place: Place, effort: Effort, freshness: Freshness
) -> tuple[dict[int, int], float, list[str]]:
    """Return steps by how late their measurements were, the seconds of one, and where it waited."""
    device, world_size = place.join(rank), len(place.devices)
    workload, batch_size = gpt(small=effort.small), 8 if effort.small else 32
    num_steps, policy = WARM_UP + (15 if effort.small else 150), Numbered()
    alone, sizes, counts, began_s = world_size == 1, [], Counter[int](), 0.0
    waits: list[str] = []
    with Balancer(policy=policy, runtime=replace(QUIET, freshness=freshness)) as balancer:
        model: Any = workload.make().to(device)
        model = model if alone else DistributedDataParallel(model)
        loader: Any = loader_of(workload, num_steps * batch_size * world_size, batch_size, device)
        model, loader = balancer.prepare(model, loader)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with ExitStack() as stack:
            for step, batch in enumerate(loader):
                if step == WARM_UP:
                    synchronize(device)
                    began_s = perf_counter()
                    if alone:  # gloo waits for the device, of itself
                        waits = stack.enter_context(watched(device))
                sizes.append(len(batch[0]))
                if step >= WARM_UP:  # the policy was shown all steps but the first, one by one
                    counts[step - len(policy.measured)] += 1
                workload.loss(model, moved(batch, device)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        synchronize(device)
        step_s = (perf_counter() - began_s) / (num_steps - WARM_UP)
    if not alone:
        counts = lateness(sizes, policy.measured, batch_size * world_size, world_size)
    return dict(sorted(counts.items())), step_s, waits


def freshness(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return by how many steps plans trail measurements, with one rank and with two.

    With one rank it is how many steps after the newest one that was shown to the policy a step
    begins, and on CUDA torch tells wherever the host waits for the device.
    """
    found: dict[str, Any] = {}
    for world_size in (1, 2):
        for how in ("newest", "exact"):
            progress(f"{world_size} ranks, freshness {how}")
            results, place = run_at(spread_over(device, world_size), late, effort, how)
            counts, step_s, waits = results[0]
            found[f"{world_size} ranks, {how}"] = {
                **place.told(),
                "steps_by_lateness": counts,
                "step_s": step_s,
                "num_waits": len(waits),
                "waits": sorted(set(waits))[:10],
            }
    headline = {name: one["steps_by_lateness"] for name, one in found.items()}
    met = found["1 ranks, newest"]["num_waits"] == 0 if device.type == "cuda" else None
    return {**found, "met": met, "headline": headline}


def exactly(rank: int, place: Place | None, effort: Effort, device: torch.device) -> list[Tensor]:
    """Return the parameters after some steps in double precision; without a place, of one rank."""
    world_size = 1 if place is None else len(place.devices)
    device = device if place is None else place.join(rank)
    workload, num_steps, batch = beside_a_cpu(small=effort.small), 6 if effort.small else 30, 24
    torch.manual_seed(0)
    model: Any = workload.make().double().to(device)
    loader: Any = loader_of(workload, num_steps * batch, batch // world_size, device)
    with ExitStack() as stack:
        if place is not None:
            model = DistributedDataParallel(model)
            balancer = stack.enter_context(Balancer(policy=Numbered(), runtime=QUIET))
            model, loader = balancer.prepare(model, loader)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for each in loader:
            workload.loss(model, moved(each, device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def exactness(device: torch.device, effort: Effort) -> dict[str, Any]:
    """Return how far parameters are from those of one process, under sizes that always change."""
    if not has_doubles(device):
        raise NotRun(f"{device.type} has no float64")
    wanted = exactly(0, None, effort, device)
    results, place = run_at(spread_over(device, 2), exactly, effort, device)
    errors = [
        float((one - other).abs().max() / other.abs().max().clamp_min(1e-300))
        for parameters in results
        for one, other in zip(parameters, wanted, strict=True)
    ]
    return {
        **place.told(),
        "model": beside_a_cpu(small=effort.small).told,
        "largest_relative_error": max(errors),
        "bar": EXACT,
        "met": max(errors) <= EXACT,
        "headline": {"largest_relative_error": max(errors)},
    }
