"""One rank of ``watch_cost``: steps that sleep, with a watch and without in turn."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.watch._attach import Attachment
from evenstep.watch._watch import Watch

NUM_WARM_UP = 5  # and so much later rank 0 may be with its line


class Own(NamedTuple):
    """Seconds that a watch took: of the thread that trains, and of its own."""

    inline_s: float
    thread_s: float


class Cpu(NamedTuple):
    """CPU seconds of a step: of the thread that trains, and of all threads of this process."""

    thread_s: float
    process_s: float


class Sleeper(nn.Module):
    """Sleeps until the time of a step is over, as if a device had worked.

    All ranks wake up at the same moments. Else one waits for the other in each step of a block, by
    what they began it apart, and its threads for the exchange take up to 2 ms more for that.
    """

    def __init__(self, step_s: float) -> None:  # the class says it
        super().__init__()
        self.step_s, self.layer = step_s, nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return one number for each sample."""
        time.sleep(self.step_s - time.monotonic() % self.step_s)
        out: torch.Tensor = self.layer(inputs)
        return out


def when_loaded(name: str, call: Callable[[Any], None]) -> None:
    """Call at once for what is there; nothing else is loaded in this process."""
    if name in sys.modules:
        call(sys.modules[name])


def train(num_steps: int, step_s: float, own_s: Callable[[], Own]) -> tuple[Cpu, Own]:
    """Return CPU seconds of a step, and what ``own_s`` grows."""
    model = DistributedDataParallel(Sleeper(step_s))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(8 * (num_steps + NUM_WARM_UP), 16))
    begin_cpu, begin = Cpu(0.0, 0.0), Own(0.0, 0.0)
    for number, (inputs,) in enumerate(DataLoader(data, batch_size=8)):
        if number == NUM_WARM_UP:
            dist.barrier()
            begin_cpu, begin = Cpu(time.thread_time(), time.process_time()), own_s()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    end_cpu, end = Cpu(time.thread_time(), time.process_time()), own_s()
    return (
        Cpu(*((np.array(end_cpu) - begin_cpu) / num_steps).tolist()),
        Own(*((np.array(end) - begin) / num_steps).tolist()),
    )


def own_seconds(watch: Watch | None) -> Own:
    """Return what a watch has taken so far, by its own account."""
    return Own(0.0, 0.0) if watch is None else Own(watch.courier.inline_s, watch.courier.thread_s)


def watched(attachment: Attachment, num_steps: int, step_s: float) -> tuple[Cpu, Own, Watch]:
    """Return what steps under a watch took, what the watch says of it, and the watch."""
    attachment.group_opens()
    watch = attachment.watch
    assert watch is not None
    took, own_s = train(num_steps, step_s, partial(own_seconds, watch))
    attachment.group_closes(None)
    return took, own_s, watch


def main(num_rounds: int, num_steps: int, num_long: int, step_s: float, launcher_dir: str) -> None:
    """Print what was measured, as JSON, from each rank in one line."""
    dist.init_process_group("gloo")
    attachment = Attachment(
        json.dumps({"every_s": 10.0, "launcher_dir": launcher_dir}), when_loaded, [], list
    )
    found: dict[str, list[float]] = {
        kind: [] for kind in ("inline", "inline_long", "thread", "bytes")
    }
    for kind in ("plain", "watched"):
        found[kind], found[f"{kind}_process"] = [], []
    train(NUM_WARM_UP, step_s, partial(own_seconds, None))
    gc.collect()
    gc.freeze()  # so that no collection of all that torch has falls on one of the two
    for number in range(num_rounds):
        for kind in ("plain", "watched")[:: 1 if number % 2 else -1]:
            if kind == "plain":
                took, _ = train(num_steps, step_s, partial(own_seconds, None))
            else:
                took, own_s, _ = watched(attachment, num_steps, step_s)
                found["inline"].append(own_s.inline_s)
            found[kind].append(took.thread_s)
            found[f"{kind}_process"].append(took.process_s)
            dist.barrier()
        if number % (num_rounds // 3) == 0:
            _, own_s, watch = watched(attachment, num_long, step_s)
            found["inline_long"].append(own_s.inline_s)
            found["thread"].append(own_s.thread_s)
            found["bytes"].append(watch.courier.num_bytes / (num_long + NUM_WARM_UP))
            dist.barrier()
    os.write(1, (json.dumps({"rank": dist.get_rank(), **found}) + "\n").encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
