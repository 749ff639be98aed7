"""What this machine can do, measured before training with all workers at once."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ._gpt import next_byte_loss
from ._training_job import TrainingJob

_SHORTEST_STEP_S = 0.25  # long against what waking many workers on two cores costs: 10 ms
_ROOM = 1.6  # emulated over real time per sample: room for what else the machine does
_FEWEST_STEPS, _MOST_STEPS = 20, 80


def communication_s(num_parameters: int, device: torch.device, *, repetitions: int = 15) -> float:
    """Return the time to average that many gradients when all workers start at the same moment.

    The median of ``repetitions``, each counted until the last worker has finished. Every worker
    gets the same answer.
    """
    gradients = torch.zeros(num_parameters, device=device)
    took_s = []
    for _ in range(repetitions):
        # Workers of one machine share this clock; 5 ms are enough for the appointment to arrive.
        start = torch.tensor([time.monotonic() + 0.005], dtype=torch.float64, device=device)
        dist.broadcast(start, src=0)
        due_s = float(start)
        time.sleep(max(0.0, due_s - time.monotonic()))
        dist.all_reduce(gradients)
        _synchronise(device)
        took = torch.tensor([time.monotonic() - due_s], dtype=torch.float64, device=device)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        took_s.append(float(took))
    return float(np.median(took_s))


def contended_seconds_per_sample(model: nn.Module, job: TrainingJob) -> float:
    """Return the real time per sample while every worker computes its equal share at once."""
    size = job.size
    tokens = torch.zeros(size.batch_size, size.context + 1, dtype=torch.int64)
    took_s = []
    for _ in range(6):
        dist.barrier()
        begin_s = time.monotonic()
        next_byte_loss(model(tokens[:, :-1]), tokens).backward()  # type: ignore[no-untyped-call]
        took_s.append(time.monotonic() - begin_s)
    model.zero_grad(set_to_none=True)
    slowest = torch.tensor([float(np.median(took_s))], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest) / size.batch_size


def choose_seconds_per_sample(job: TrainingJob, real_s: float) -> float:
    """Return the emulated cost of a sample at speed 1: the real computing must fit into it.

    A balanced step is to last ``_SHORTEST_STEP_S`` at least, and the fastest worker to have
    ``_ROOM`` times what a sample really costs.
    """
    assert job.speeds is not None
    for_length = _SHORTEST_STEP_S * sum(job.speeds) / job.global_batch_size
    return max(for_length, _ROOM * real_s * max(job.speeds))


def choose_num_steps(job: TrainingJob, seconds_per_sample: float) -> int:
    """Return how many steps of the equal and the balanced run fit in the job's budget."""
    assert job.speeds is not None
    share = job.global_batch_size / len(job.speeds)
    equal_s = seconds_per_sample * share / min(job.speeds)
    balanced_s = seconds_per_sample * job.global_batch_size / sum(job.speeds)
    return int(np.clip(job.budget_s / (equal_s + balanced_s), _FEWEST_STEPS, _MOST_STEPS))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
