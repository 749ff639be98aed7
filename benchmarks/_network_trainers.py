"""What every host of the training rows runs: real DDP training whose computing is emulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from time import perf_counter, sleep
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._network_arena import gathered
from evenstep.events import Event, SharesPlanned
from evenstep.torch import Balancer, Network, Runtime

LAYER = 2**18  # elements: 1 MB
EPOCH = 100_000  # samples: more than anybody gets to


class Sleeping(nn.Module):
    """Weights whose gradient is the mean of the inputs, after so much sleep for each sample."""

    def __init__(self, num_elements: int, intercept_s: float, slope_s: float) -> None:
        super().__init__()
        sizes = [LAYER] * (num_elements // LAYER) + [num_elements % LAYER]
        self.layers = nn.ParameterList(torch.zeros(size) for size in sizes if size)
        self.intercept_s, self.slope_s = intercept_s, slope_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each sample, in due time."""
        end_s = perf_counter() + self.intercept_s + self.slope_s * len(x)
        y = x * torch.stack([layer.sum() for layer in self.layers]).sum()
        sleep(max(0.0, end_s - perf_counter()))
        return y


@final
class Trainer:
    """One contestant on one rank: a model, its balancer, and its way through the samples.

    Args:
        settings: of the job: elements, samples, times of computing.
        asked: of the contestant: how sizes and gradients are shared out.
    """

    def __init__(self, settings: dict[str, Any], asked: dict[str, Any]) -> None:
        rank = dist.get_rank()
        slope_s = settings["slope_s"][rank]
        torch.manual_seed(0)
        model = Sleeping(settings["num_elements"], settings["intercept_s"], slope_s)
        self.plans: list[SharesPlanned] = []
        network = asked["network"]
        self._stack = ExitStack()
        balancer = Balancer(
            policy=asked["policy"],
            runtime=Runtime(line_every=None, hooks=(self._hear,)),
            network=None if network is None else Network(**network),
        )
        self._stack.enter_context(balancer)
        draws = torch.Generator().manual_seed(1)
        samples = TensorDataset(torch.randn(EPOCH, generator=draws))
        stock = DataLoader(samples, batch_size=settings["global_batch_size"] // 4)
        self._wrapped, loader = balancer.prepare(DistributedDataParallel(model), stock)
        self._batches: Iterator[list[torch.Tensor]] = iter(loader)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self._model = model

    def step(self) -> float:
        """Take a step, and return when it ended."""
        (x,) = next(self._batches)
        self._wrapped(x).mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return perf_counter()

    def _hear(self, event: Event) -> None:
        if isinstance(event, SharesPlanned):
            self.plans.append(event)

    def close(self) -> dict[str, Any] | None:
        """End it, and return on rank 0 what is to be known of its parameters and plans."""
        with torch.no_grad():
            flat = torch.cat([layer.flatten() for layer in self._model.layers])
        digest = sha256(flat.numpy().tobytes()).hexdigest()
        told = gathered((digest, bool(flat.isfinite().all())))
        self._stack.close()
        if told is None:
            return None
        return {
            "alike": all(each[0] == digest for each in told),
            "finite": all(each[1] for each in told),
            "plans": [(one.step, one.predicted_s, one.plain_s, one.reason) for one in self.plans],
        }


def in_turns(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of every contestant's steps from its very first one on, in blocks.

    They take turns in blocks of some steps, each of which all ranks begin together.
    """
    trainers = {one["name"]: Trainer(settings, one) for one in settings["contestants"]}
    names, seconds = list(trainers), {name: list[float]() for name in trainers}
    for turn in range(settings["num_steps"] // settings["block"]):
        for name in names if turn % 2 else names[::-1]:
            dist.barrier()
            before_s = perf_counter()
            for _ in range(settings["block"]):
                now_s = trainers[name].step()
                seconds[name].append(now_s - before_s)
                before_s = now_s
    return {"seconds": seconds, "ends": {name: one.close() for name, one in trainers.items()}}
