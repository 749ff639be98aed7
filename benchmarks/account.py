"""Whether the account of a step is true: known sleeps in each part, on real ranks over gloo.

Ranks train a small model. What they do in a step is mostly to sleep: in the data set, in the
forward, in the backward, on the link, in the optimizer, in the loop, in evaluations and in
checkpoints, each for a time that a seed draws anew for every step and rank. So where the time goes
is known, waiting included: ranks wait until the last one has slept.
"""

import argparse
import io
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks._common import Row, main, progress
from benchmarks._sleepers import Due
from evenstep._telemetry import ProgressLine
from evenstep._telemetry._line import PARTS
from evenstep.events import Event, StepsAccounted
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Checkpoint, Runtime

WORLD_SIZE, BATCH_SIZE, WIDTH = 3, 4, 32
WARM_UP = 2  # steps that are not compared: DDP settles its buckets
REST_EVERY = 8  # steps from one evaluation and checkpoint to the next
SLEEPS_S = {
    "input": (0.02, 0.06),
    "forward": (0.03, 0.20),
    "backward": (0.03, 0.20),
    "communication": (0.05, 0.15),
    "optimizer": (0.02, 0.06),
    "rest": (0.02, 0.06),
    "evaluation": (0.3, 0.5),
    "checkpoint": (1.0, 1.5),
}
"""Shortest and longest sleep in each part. The link is all ranks' at once, as is a checkpoint."""

Sleeps = dict[str, np.ndarray]
"""Seconds by part, each ``(num_steps, world_size)``."""


def drawn(seed: int, num_steps: int) -> Sleeps:
    """Return how long every rank sleeps in every part of every step."""
    rng = np.random.default_rng(seed)
    sleeps = {}
    for part, limits in SLEEPS_S.items():
        alike = part in ("communication", "checkpoint")
        found = rng.uniform(*limits, (num_steps, 1 if alike else WORLD_SIZE))
        sleeps[part] = np.repeat(found, WORLD_SIZE, axis=1) if alike else found
    seldom = np.arange(num_steps) % REST_EVERY != REST_EVERY - 1
    for part in ("evaluation", "checkpoint"):
        sleeps[part][seldom] = 0.0
    return sleeps


def truth(sleeps: Sleeps) -> Sleeps:
    """Return where the time of every step goes: from its hand-out to that of the next one.

    Ranks meet after the backward, in the mean, and in a checkpoint. They leave these together.
    """
    has_met = sleeps["checkpoint"] > 0
    arrived = sleeps["input"] + sleeps["forward"] + sleeps["backward"]
    later = sleeps["optimizer"] + sleeps["rest"]
    late = np.where(has_met, _wait(sleeps["evaluation"]), 0.0)
    found = dict(sleeps)
    found["input"] = np.roll(sleeps["input"], -1, axis=0)  # of the next step
    found["waiting"] = _wait(arrived) + _wait(later)
    found["checkpoint"] = sleeps["checkpoint"] + late
    return found


def _wait(arrived_s: np.ndarray) -> np.ndarray:
    return arrived_s.max(axis=1, keepdims=True) - arrived_s


@dataclass(slots=True)
class Naps:
    """This rank's sleeps.

    Attributes:
        sleeps: of all ranks.
        rank: this one.
        step: the one under way.
        awake: whether training has begun.
    """

    sleeps: Sleeps
    rank: int
    step: int = 0
    awake: bool = False

    def take(self, part: str, step: int | None = None) -> None:
        """Sleep as long as is due."""
        sleep(float(self.sleeps[part][self.step if step is None else step, self.rank]))

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, in due time: what a checkpoint waits for."""
        self.take("checkpoint")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Do nothing."""


class Slow(nn.Module):
    """Sleeps in its forward, and in its backward."""

    def __init__(self, naps: Naps) -> None:
        """Keep the sleeps."""
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.naps = naps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, in due time."""
        if not self.training:
            return self.last(self.first(x))  # type: ignore[no-any-return]
        self.naps.take("forward")
        return self.last(Due.apply(self.first(x), partial(self.naps.take, "backward")))  # type: ignore[no-any-return, no-untyped-call]


class SlowSgd(torch.optim.SGD):
    """Sleeps in its step."""

    naps: Naps

    def step(self, closure: Any = None) -> Any:
        """Step, in due time."""
        self.naps.take("optimizer")
        return super().step(closure)


class SlowData(Dataset[torch.Tensor]):
    """Sleeps at the first sample of every step."""

    def __init__(self, num_steps: int, naps: Naps) -> None:
        """Have samples for so many steps."""
        self.num_samples, self.naps = num_steps * BATCH_SIZE * WORLD_SIZE, naps
        self.newest = -1

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        step = index // (BATCH_SIZE * WORLD_SIZE)
        if self.naps.awake and step > self.newest:
            self.newest = step
            self.naps.take("input", step)
        return torch.zeros(WIDTH)


def slow_link(
    naps: Naps,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # in none of torch's stubs
) -> torch.futures.Future[torch.Tensor]:
    """All-reduce, and have the sums arrive late: DDP's hook for that."""

    work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
    sums: torch.futures.Future[torch.Tensor] = torch.futures.Future()  # type: ignore[no-untyped-call]

    def carry() -> None:  # not in a callback: one of a work that is done runs in the backward
        work.wait()
        naps.take("communication")
        sums.set_result(bucket.buffer() / WORLD_SIZE)

    threading.Thread(target=carry).start()
    return sums


def train(rank: int, seed: int, num_steps: int, folder: str) -> dict[str, Any]:
    """Train on this rank; return what rank 0 heard, and what the steps took by a stopwatch."""
    naps = Naps(drawn(seed, num_steps), rank)
    heard: list[Event] = []
    stream = io.StringIO()
    hooks = (heard.append, ProgressLine(stream, num_steps))
    model = DistributedDataParallel(Slow(naps))
    model.register_comm_hook(naps, slow_link)
    optimizer = SlowSgd(model.parameters(), lr=0.0)
    optimizer.naps = naps
    began_s: list[float] = []
    with Balancer(policy="equal", runtime=Runtime(line_every=None, hooks=hooks)) as balancer:
        stock = DataLoader(SlowData(num_steps, naps), batch_size=BATCH_SIZE)
        model, loader = balancer.prepare(model, stock)
        held_out = balancer.prepare_eval(
            DataLoader(TensorDataset(torch.zeros(WORLD_SIZE, WIDTH)), batch_size=1)
        )
        checkpoint = Checkpoint(
            folder, model=model, optimizer=optimizer, balancer=balancer, others={"naps": naps}
        )
        naps.awake = True
        used_s = process_time()
        for step, x in enumerate(loader):
            began_s.append(perf_counter())
            naps.step = step
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            naps.take("rest")
            balancer.mean(loss)
            if naps.sleeps["checkpoint"][step, rank]:
                evaluate(model, held_out, naps)
                checkpoint.save(step + 1)
        used_s = process_time() - used_s
    accounts = [event for event in heard if isinstance(event, StepsAccounted)]
    return {"accounts": accounts, "line": stream.getvalue(), "began_s": began_s, "used_s": used_s}


def evaluate(model: nn.Module, held_out: Any, naps: Naps) -> None:
    """Evaluate this rank's one batch."""
    model.eval()
    with torch.no_grad():
        for (x,) in held_out:
            model(x)
            naps.take("evaluation")
    model.train()


def compare(sleeps: Sleeps, accounts: Sequence[StepsAccounted]) -> Iterator[Row]:
    """Return a row for each part: its share of every rank's time, told and true."""
    steps = [one.step for one in accounts]
    true = {part: found[steps].sum(axis=0) for part, found in truth(sleeps).items()}
    told = {part: np.sum([getattr(one, f"{part}_s") for one in accounts], axis=0) for part in PARTS}
    true_wall_s, told_wall_s = sum(true.values()), sum(told.values())
    for part in PARTS:
        true_share, told_share = true[part] / true_wall_s, told[part] / told_wall_s
        error = float(np.abs(told_share / true_share - 1).max())
        yield Row(
            f"{part}: its share of a rank's time, over {len(steps)} steps",
            "within 10 % of the truth on every rank",
            {"worst_error": error, "told": told_share.tolist(), "true": true_share.tolist()},
            met=error <= 0.1,
        )


def line_row(found: dict[str, Any]) -> Row:
    """Return the row of the progress line: what it says a step takes, and rank 0's stopwatch."""
    (said,) = re.findall(r", step ([\d.]+) s", found["line"])
    took_s = float(np.diff(found["began_s"]).mean())
    error = abs(float(said) / took_s - 1)
    return Row(
        "the progress line's step",
        "within 2 % of a stopwatch in the loop",
        {"error": error, "said_s": float(said), "took_s": took_s, "line": found["line"].strip()},
        met=error <= 0.02,
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Train once, and compare."""
    num_steps = 18 if options.quick else 58
    sleeps = drawn(options.seed, num_steps)
    slept_s = sum(truth(sleeps).values()).sum(axis=0)
    progress(f"{num_steps} steps that sleep, {slept_s.max():.0f} s")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "checkpoints"
        found = run_workers(WORLD_SIZE, train, options.seed, num_steps, str(folder))
    accounts = [one for one in found[0]["accounts"] if one.step >= WARM_UP]
    yield from compare(sleeps, accounts)
    yield line_row(found[0])
    own_s = sum(part.sum(axis=0) for part in sleeps.values())
    ratio = min(float(own_s[rank]) / one["used_s"] for rank, one in enumerate(found))
    yield Row(
        "own sleep over CPU time, on the rank where it is least",
        ">= 5",
        {"ratio": ratio},
        met=ratio >= 5,
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the seed."""
    parser.add_argument("--seed", type=int, default=20, help="draws the sleeps")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
