"""One worker process of the demo: what a user's own training script looks like.

Started by torchrun: ``python -m evenstep.demo._worker DIR``.
"""

from __future__ import annotations

import gc
import json
import sys
import sysconfig
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from ..torch import Balancer, Runtime

WIDTH, CONTEXT, BATCH_SIZE = 64, 64, 24  # about 1 ms a sample on one core
_BUDGET_S = 54.0  # of the equal and the balanced run together
_SHORTEST_STEP_S = 0.25  # long against what waking many workers on two cores costs: 10 ms
_ROOM = 1.6  # emulated over real time of a sample: room for what else the machine does


@dataclass(frozen=True, slots=True)
class DemoJob:
    """One training run: the same text and weights as the other, its own policy.

    Attributes:
        policy: name of the policy, or ``"module:Class"``.
        speeds: emulated speeds, one per worker.
        num_steps: optimizer steps; None takes as many as fit in about a minute.
        seconds_per_sample: emulated cost of a sample at speed 1; None measures the machine.
    """

    policy: str
    speeds: tuple[float, ...]
    num_steps: int | None
    seconds_per_sample: float | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all workers."""
        return BATCH_SIZE * len(self.speeds)


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """What a run has to say beside its events.

    Attributes:
        num_steps, seconds_per_sample: as in the job, chosen where that left them open.
        num_late: steps in which the real computing took longer than the emulated time.
        loss: mean over the global batch, step by step.
    """

    num_steps: int
    seconds_per_sample: float
    num_late: int
    loss: list[float]


class GPT(nn.Module):
    """A causal transformer over bytes that takes ``seconds_per_sample`` for each sample.

    It computes for real, then the last part of its backward sleeps until that time has passed
    since the forward began. A worker that sleeps leaves its core to the others, so two cores can
    play many workers, as long as the real computing is the shorter part; ``num_late`` counts the
    steps in which it was not. The policy is not informed: it sees a worker that takes its time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.place = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.seconds_per_sample, self.num_late = 0.0, 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, time, 256)`` of the bytes that follow ``(batch, time)``."""
        due_s = time.monotonic() + len(tokens) * self.seconds_per_sample
        hidden = self.embed(tokens) + self.place[: tokens.shape[1]]
        hidden.register_hook(lambda _: self._wait(due_s))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return F.linear(self.blocks(hidden, mask, is_causal=True), self.embed.weight)

    def _wait(self, due_s: float) -> None:
        left_s = due_s - time.monotonic()
        self.num_late += left_s < 0
        time.sleep(max(0.0, left_s))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of each byte given those before it, in nats."""
    tokens = tokens.long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def standard_library() -> TensorDataset:
    """Return all sources of Python's standard library in pieces of ``CONTEXT + 1`` bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # Sorted, so that every worker numbers the pieces alike.
    files = sorted(file for file in folder.rglob("*.py") if "-packages" not in str(file))
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    return TensorDataset(text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1))


def main(run_dir: Path) -> None:
    """Train as ``run_dir/job.json`` says, and leave ``outcome.json`` there."""
    job = DemoJob(**json.loads((run_dir / "job.json").read_text()))
    dist.init_process_group("gloo")
    try:
        outcome = _trained(job, run_dir)
        if dist.get_rank() == 0:
            (run_dir / "outcome.json").write_text(json.dumps(asdict(outcome)))
    finally:
        dist.destroy_process_group()
        # Modules with hooks are garbage in cycles, and DDP keeps the group's threads alive. One of
        # them that lets go of a tensor while Python shuts down aborts the process (torch 2.13).
        gc.collect()


def _trained(job: DemoJob, run_dir: Path) -> DemoOutcome:
    torch.manual_seed(0)
    gpt, text = GPT(), standard_library()
    per_sample_s = job.seconds_per_sample or _seconds_per_sample(gpt, job)
    num_steps = job.num_steps or _num_steps(job, per_sample_s)
    gpt.seconds_per_sample = per_sample_s / job.speeds[dist.get_rank()]
    return DemoOutcome(num_steps, per_sample_s, *train(gpt, text, job, num_steps, run_dir))


def train(
    gpt: GPT, text: TensorDataset, job: DemoJob, num_steps: int, run_dir: Path
) -> tuple[int, list[float]]:
    """Return the late steps of the worker that had most, and the losses."""
    order = torch.Generator().manual_seed(0)
    sampler = RandomSampler(text, num_samples=num_steps * job.global_batch_size, generator=order)
    loader = DataLoader(text, batch_size=BATCH_SIZE, sampler=sampler)
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    sums = []
    with Balancer(policy=job.policy, runtime=Runtime(run_dir=run_dir)) as balancer:
        balanced, batches = balancer.prepare(model, loader)
        for (tokens,) in batches:
            loss = loss_of(balanced, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            sums.append(loss.detach().double() * len(tokens))
    losses = torch.stack(sums) / job.global_batch_size
    dist.all_reduce(losses)
    return int(_most(gpt.num_late)), losses.tolist()


def _seconds_per_sample(gpt: GPT, job: DemoJob) -> float:
    """Return the emulated cost of a sample at speed 1: real computing has to fit into it.

    What a sample really costs is measured while all workers compute their equal shares at once.
    """
    took_s = []
    for _ in range(6):
        dist.barrier()
        begin_s = time.monotonic()
        loss_of(gpt, torch.zeros(BATCH_SIZE, CONTEXT + 1)).backward()  # type: ignore[no-untyped-call]
        took_s.append(time.monotonic() - begin_s)
    gpt.zero_grad(set_to_none=True)
    gpt.num_late = 0
    for_length = _SHORTEST_STEP_S * sum(job.speeds) / job.global_batch_size
    return max(for_length, _ROOM * _most(median(took_s)) / BATCH_SIZE * max(job.speeds))


def _num_steps(job: DemoJob, per_sample_s: float) -> int:
    """Return how many steps of the equal and the balanced run fit in the budget."""
    equal_s = BATCH_SIZE * per_sample_s / min(job.speeds)
    balanced_s = job.global_batch_size * per_sample_s / sum(job.speeds)
    return min(max(int(_BUDGET_S / (equal_s + balanced_s)), 20), 80)


def _most(value: float) -> float:
    """Return the largest ``value`` over all workers."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception:
        with (Path(sys.argv[1]) / "failed.txt").open("a") as file:
            file.write(traceback.format_exc())
        raise
