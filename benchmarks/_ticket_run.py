"""One run of `benchmarks.ticket_cost`: two workers of whichever evenstep `PYTHONPATH` names.

Prints a JSON object.
"""

from __future__ import annotations

import json
import sys
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist

import evenstep
from benchmarks._sleepers import loader_of, sleeper
from evenstep.policies import Fixed
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

BATCH_SIZE, WIDTH = 10, 64
BLOCK = 25  # steps of one kind in a row
WARM_UP = 2  # blocks of each kind


def train(rank: int, num_rounds: int, step_s: float) -> dict[str, float]:
    """Return mean seconds of plain and balanced steps, medians over blocks, and their CPU seconds.

    Kinds take turns block by block: work of other threads that goes on past the end of a step
    falls on steps of the same kind. A mean, as most steps of this length take 6, 8 or 10 ms, by
    how long a socket takes to wake a process: a median jumps between those.

    CPU seconds are those of all threads of this process, and say something on a busy machine too.
    """
    num_blocks = max(1, num_rounds // BLOCK) + WARM_UP
    num_steps = num_blocks * BLOCK
    models = [sleeper(0.0, step_s / BATCH_SIZE, width=WIDTH) for _ in range(2)]
    plain = loader_of(num_steps, BATCH_SIZE, 1, width=WIDTH)
    policy = Fixed((BATCH_SIZE, BATCH_SIZE))  # only what every step costs, no decisions
    with Balancer(policy=policy, runtime=Runtime(line_every=None)) as balancer:
        stock = loader_of(num_steps, BATCH_SIZE, 2, width=WIDTH)
        models[1], balanced = balancer.prepare(models[1], stock)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
        batches = [iter(plain), iter(balanced)]
        wall_s: tuple[list[float], list[float]] = ([], [])
        cpu_s: tuple[list[float], list[float]] = ([], [])
        for turn in range(num_blocks):
            for index in (0, 1) if turn % 2 else (1, 0):
                dist.barrier()
                began_s, used_s = perf_counter(), process_time()
                for _ in range(BLOCK):
                    (x,) = next(batches[index])
                    models[index](x).mean().backward()
                    optimizers[index].step()
                    optimizers[index].zero_grad()
                if turn >= WARM_UP:
                    wall_s[index].append((perf_counter() - began_s) / BLOCK)
                    cpu_s[index].append((process_time() - used_s) / BLOCK)
        batches.clear()
    more_s = [ours - theirs for theirs, ours in zip(*wall_s, strict=True)]
    return {
        "plain_s": median(wall_s[0]),
        "balanced_s": median(wall_s[1]),
        "more_s": median(more_s),
        "more_cpu_s": median(cpu_s[1]) - median(cpu_s[0]),
    }


if __name__ == "__main__":
    found = run_workers(2, train, int(sys.argv[1]), float(sys.argv[2]))[0]
    print(json.dumps(found | {"file": evenstep.__file__}))
