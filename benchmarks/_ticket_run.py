"""One run of `benchmarks.ticket_cost`: two workers, which train with each checkout and without.

Prints a JSON object: the seconds of a step by block, and by whose it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._sleepers import loader_of, sleeper
from evenstep.testing import run_workers

BATCH_SIZE, WIDTH = 10, 64
BLOCK = 25  # steps of one kind in a row
WARM_UP = 2  # turns


def package(name: str, src: Path) -> None:
    """Import the evenstep of a checkout under another name: inside, it imports relatively."""
    file = src / "evenstep" / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(file.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def balancer_of(name: str) -> Any:
    """Return a balancer of a package that was imported under this name; it decides nothing."""
    home, policies = (importlib.import_module(f"{name}.{room}") for room in ("torch", "policies"))
    policy = policies.Fixed((BATCH_SIZE, BATCH_SIZE))
    return home.Balancer(policy=policy, runtime=home.Runtime(line_every=None))


def train(
    rank: int, packages: dict[str, str], num_turns: int, step_s: float
) -> dict[str, dict[str, list[float]]]:
    """Return seconds and CPU seconds of a step, each a mean over a block.

    All take turns block by block in the same processes: what falls on one run or moment falls on
    all of them. A mean, as most steps of this length take 6, 8 or 10 ms, by how long a socket
    takes to wake a process: a median jumps between those.

    CPU seconds are those of all threads of this process, and say something on a busy machine too.
    """
    num_steps = (num_turns + WARM_UP) * BLOCK
    names = ["plain", *packages]
    models = {name: sleeper(0.0, step_s / BATCH_SIZE, width=WIDTH) for name in names}
    batches = {"plain": iter(loader_of(num_steps, BATCH_SIZE, 1, width=WIDTH))}
    balancers = []
    for name, src in packages.items():
        if name != "evenstep":
            package(name, Path(src))
        balancers.append(balancer_of(name))
        stock = loader_of(num_steps, BATCH_SIZE, 2, width=WIDTH)
        models[name], loader = balancers[-1].prepare(models[name], stock)
        batches[name] = iter(loader)
    optimizers = {name: torch.optim.SGD(models[name].parameters(), lr=0.0) for name in names}
    found: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "cpu_s": []} for name in names}
    for turn in range(num_turns + WARM_UP):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            began_s, used_s = perf_counter(), process_time()
            for _ in range(BLOCK):
                (x,) = next(batches[name])
                models[name](x).mean().backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
            if turn >= WARM_UP:
                found[name]["wall_s"].append((perf_counter() - began_s) / BLOCK)
                found[name]["cpu_s"].append((process_time() - used_s) / BLOCK)
    batches.clear()
    for balancer in balancers:
        balancer.close()
    return found


if __name__ == "__main__":
    checkouts = json.loads(sys.argv[1])
    print(json.dumps(run_workers(2, train, checkouts, int(sys.argv[2]), float(sys.argv[3]))[0]))
