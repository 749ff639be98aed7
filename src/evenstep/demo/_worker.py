"""One worker process of the demo: what a user's own training script looks like.

Started by torchrun, or by itself as a run of one process: ``python -m evenstep.demo._worker DIR``.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

from ..torch import Balancer, Runtime
from . import _measure
from ._emulate import Emulation
from ._gpt import GPT, next_byte_loss
from ._notes import Notebook
from ._text import Corpus
from ._training_job import TrainingJob

_LOSSES_AT_ONCE = 5  # one small all-reduce shares the losses of that many steps


def main(run_dir: Path) -> None:
    """Train as ``run_dir/job.json`` says."""
    gc.freeze()  # what was imported is no garbage: looking through it at the end takes 0.5 s
    job = TrainingJob.load(run_dir)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    notes = Notebook(run_dir if rank == 0 else None)
    try:
        device = _start(job)
        _train(job, device, run_dir, notes, rank, world_size)
    except BaseException:
        (run_dir / f"failed-rank{rank}.txt").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # Modules with hooks are garbage in cycles, and DDP keeps the group's threads alive. One of
        # them that lets go of a tensor while Python shuts down aborts the process (torch 2.13).
        gc.collect()


def _start(job: TrainingJob) -> torch.device:
    """Join the other workers and return this one's device."""
    if "RANK" not in os.environ:
        return torch.device(job.device)
    if job.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def _train(
    job: TrainingJob,
    device: torch.device,
    run_dir: Path,
    notes: Notebook,
    rank: int,
    world_size: int,
) -> None:
    notes.write("Phase", text="reading Python's standard library")
    text = Corpus(job.size.context)
    torch.manual_seed(job.seed)
    gpt = GPT(job.size).to(device)
    num_steps, emulation = _prepare_machine(job, gpt, device, notes, rank)

    order = torch.Generator().manual_seed(job.seed)
    sampler = RandomSampler(text, num_samples=num_steps * job.global_batch_size, generator=order)
    stock = DataLoader(text, batch_size=job.global_batch_size // world_size, sampler=sampler)
    wrapped: nn.Module = DistributedDataParallel(gpt) if dist.is_initialized() else gpt
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-3, fused=True)
    losses = _Losses(job.global_batch_size, notes)

    notes.write("Phase", text="training")
    balancer = Balancer(policy=job.policy, runtime=Runtime(run_dir=run_dir))
    model, loader = balancer.prepare(wrapped, stock)
    for tokens in loader:
        tokens = tokens.to(device)
        loss = next_byte_loss(model(tokens[:, :-1]), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.add(loss.detach(), len(tokens))
    balancer.close()

    losses.share()
    notes.write("Done", late_steps=_most(emulation.num_late if emulation else 0, device))


def _prepare_machine(
    job: TrainingJob, gpt: GPT, device: torch.device, notes: Notebook, rank: int
) -> tuple[int, Emulation | None]:
    """Measure what has to be known beforehand; slow this worker down if the job asks for it."""
    if not dist.is_initialized():
        assert job.num_steps is not None
        return job.num_steps, None
    notes.write("Phase", text="measuring this machine")
    num_parameters = sum(parameter.numel() for parameter in gpt.parameters())
    communication_s = _measure.communication_s(num_parameters, device)
    num_steps, per_sample_s = job.num_steps, job.seconds_per_sample
    if job.speeds is not None:
        if per_sample_s is None:
            real_s = _measure.contended_seconds_per_sample(gpt, job)
            per_sample_s = _measure.choose_seconds_per_sample(job, real_s)
        num_steps = num_steps or _measure.choose_num_steps(job, per_sample_s)
    num_steps = num_steps or 150
    notes.write(
        "Measured",
        communication_s=communication_s,
        seconds_per_sample=per_sample_s,
        num_steps=num_steps,
        num_parameters=num_parameters,
    )
    if job.speeds is None or per_sample_s is None:
        return num_steps, None
    return num_steps, Emulation(gpt, gpt.embed, per_sample_s / job.speeds[rank])


class _Losses:
    """The loss of every step over the whole global batch, shared now and then."""

    def __init__(self, global_batch_size: int, notes: Notebook) -> None:
        self._global_batch_size = global_batch_size
        self._notes = notes
        self._first_step = 0
        self._sums: list[Tensor] = []

    def add(self, mean: Tensor, num_samples: int) -> None:
        self._sums.append(mean * num_samples)
        if len(self._sums) == _LOSSES_AT_ONCE:
            self.share()

    def share(self) -> None:
        if not self._sums:
            return
        sums = torch.stack(self._sums).double()
        if dist.is_initialized():
            dist.all_reduce(sums)
        means = (sums / self._global_batch_size).tolist()
        self._notes.write("Losses", first_step=self._first_step, loss=means)
        self._first_step += len(means)
        self._sums = []


def _most(value: int, device: torch.device) -> int:
    """Return the largest ``value`` over all workers."""
    largest = torch.tensor([value], device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def _end_with_parent() -> None:
    """End this process once the one that started it is gone, so that none is left behind."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with_parent()
    main(Path(sys.argv[1]))
