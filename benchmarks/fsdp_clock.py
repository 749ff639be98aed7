"""Own time of a rank under FSDP2 in a plain loop, told from marks around collectives.

Under FSDP2 ranks wait for each other in every layer, so evenstep measures nothing in loops over
whole batches. This is a prototype of a clock that would. On the thread that trains, it notes when a
collective or a `Work.wait` begins and ends, when a batch is handed out and when own backward ends,
in one array. Another thread works out own time: from the hand-out to the end of own backward, less
the union of the collectives.

Four layers and their root are sharded over gloo. Each layer sleeps in its forward and its backward,
in proportion to its rows, so the truth is known: the seconds that were slept, and the CPU time of
the training thread in the same step. Outside of sleeps the clock counts the wait for a core as
computing and the truth does not, so that single steps are far off on a busy machine.

Ranks meet in every layer, so a step takes the sum over collectives of the longest part before each,
and their transfers. Where layers are prefetched with `async_op`, a rank may be late when a gather
begins and early when it is needed, and the sum is too long; a replay of all ranks, in which a wait
ends once all have begun, is right in both. Both are fitted to the parts of two splits and compared
with a third one. Ranks whose steps have different collectives are
not compared. Nothing is said of CUDA, where collectives run on streams and the host waits for none.
"""

from __future__ import annotations

import argparse
import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._common import Row, main, progress
from benchmarks._fsdp_marks import HANDOUT, OWN_END, Meeting, Reader, Ring, Step, marked
from evenstep.testing import run_workers

WIDTH, NUM_LAYERS = 64, 4
NUM_WARM = 3  # steps at the begin that are left out, one of each split
QUICK = "speeds 1:2, reshard on"
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """One case.

    Attributes:
        name: what it is called.
        row_s: seconds that a row takes in each layer's forward, and again in its backward, by rank.
        splits: sizes by rank; the first two are fitted to, the third is predicted.
        reshards: whether layers give up their parameters after a forward.
        prefetches: whether each layer has the next one gathered while it computes.
    """

    name: str
    row_s: tuple[tuple[float, ...], ...]
    splits: tuple[Sizes, Sizes, Sizes]
    reshards: bool
    prefetches: bool = False

    def __str__(self) -> str:
        reshards = "reshard on" if self.reshards else "reshard off"
        return f"{self.name}, {reshards}" + ", prefetch" * self.prefetches


def cells() -> Iterator[Cell]:
    """Yield each case, both ways of resharding."""
    slow, fast = (0.005,) * NUM_LAYERS, (0.0025,) * NUM_LAYERS
    odd, even = (0.005, 0.0025) * 2, (0.0025, 0.005) * 2
    two, three = ((8, 8), (11, 5), (5, 11)), ((8, 8, 8), (10, 10, 4), (6, 6, 12))
    turned = ((11, 5), (5, 11), (8, 8))  # at the last one, each rank is the slowest somewhere
    for reshards in (True, False):
        yield Cell("speeds 1:2", (slow, fast), two, reshards)
        yield Cell("speeds 1:1:2", (slow, slow, fast), three, reshards)
        yield Cell("equal speeds", (slow, slow), two, reshards)
        yield Cell("slow in different layers", (odd, even), turned, reshards)
    yield Cell("speeds 1:2", (slow, fast), two, reshards=True, prefetches=True)
    yield Cell("slow in different layers", (odd, even), turned, reshards=True, prefetches=True)


class Nap(torch.autograd.Function):
    """An identity that sleeps for each row, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, truth: Truth, row_s: float) -> torch.Tensor:
        """Sleep."""
        ctx.truth, ctx.seconds = truth, row_s * len(x)
        truth.sleep(ctx.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Sleep again."""
        ctx.truth.sleep(ctx.seconds)
        return grads[0], None, None


@final
@dataclass
class Truth:
    """What a step's own time was, told by what takes it and by the operating system.

    Attributes:
        own_s: by step, the seconds slept and of CPU time up to the end of own backward.
    """

    own_s: list[float] = field(default_factory=list)
    _slept_s: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep, and count how long that took."""
        begin_s = perf_counter()
        if seconds:
            sleep(seconds)
        self._slept_s += perf_counter() - begin_s

    def begin(self) -> None:
        """Begin a step."""
        self._slept_s, self._cpu_s = 0.0, thread_time()

    def end(self) -> None:
        """End own backward."""
        self.own_s.append(self._slept_s + thread_time() - self._cpu_s)


class Layer(nn.Module):
    """A linear layer that sleeps.

    Args:
        truth: counts the sleep.
        row_s: seconds for each row, forward and again backward.
    """

    def __init__(self, truth: Truth, row_s: float) -> None:  # noqa: D107  # the class says it
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.truth, self.row_s = truth, row_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, in due time."""
        return torch.tanh(Nap.apply(self.linear(x), self.truth, self.row_s))


def model_of(truth: Truth, row_s: tuple[float, ...], cell: Cell) -> nn.Module:
    """Return sharded layers that sleep, and a head, which is the root's own."""
    layers = [Layer(truth, each_s) for each_s in row_s]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=cell.reshards)
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    fully_shard(model, reshard_after_forward=None if cell.reshards else False)  # as a root stands
    if cell.prefetches:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
        for layer in [*layers, model]:
            layer._set_unshard_async_op(True)
    return model


class Ends(torch.autograd.Function):
    """An identity at the model's output, before which FSDP2 has heard of no backward."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, ended: Any) -> torch.Tensor:
        """Return the output."""
        ctx.ended = ended
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Have the end of own backward heard of, before FSDP2's own last callback waits."""
        Variable._execution_engine.queue_callback(ctx.ended)
        return grads[0], None


@dataclass
class Trained:
    """What one rank found.

    Attributes:
        losses: by step.
        steps: as the clock has them, without the last one; none without a clock.
        own_s: what they are compared with.
    """

    losses: list[float]
    steps: list[Step] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)


def train(rank: int, cell: Cell, num_steps: int, clocked: bool, sleeps: bool) -> Trained:
    """Train on the splits in turns, so many steps each after the first ones, and one step more."""
    torch.manual_seed(0)
    truth, ring = Truth(), Ring()
    row_s = cell.row_s[rank] if sleeps else (0.0,) * NUM_LAYERS
    model = model_of(truth, row_s, cell)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    splits = [*cell.splits * (1 + num_steps), cell.splits[0]]
    losses = []

    def ended() -> None:
        if clocked:
            ring.note(OWN_END)
        truth.end()

    with ExitStack() as stack:
        if clocked:
            stack.enter_context(marked(ring))
            reader = Reader(ring)
        for split, (x, y) in zip(splits, batches(rank, splits), strict=True):
            truth.begin()
            if clocked:
                ring.note(HANDOUT)
            loss = (Ends.apply(model(x), ended) - y).square().sum() * (len(split) / sum(split))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not clocked:
            return Trained(losses)
        steps = reader.close()
    return Trained(losses, steps, truth.own_s)


def batches(rank: int, splits: list[Sizes]) -> DataLoader[Any]:
    """Return a stock loader of this rank's rows of each step."""
    drawn = torch.Generator().manual_seed(1)
    mine = []
    for split in splits:
        rows = torch.randn(sum(split), WIDTH, generator=drawn)
        x = rows[sum(split[:rank]) :][: split[rank]]
        mine += [*zip(x, x.mean(dim=1, keepdim=True), strict=True)]
    data = TensorDataset(*(torch.stack(part) for part in zip(*mine, strict=True)))
    ends = np.cumsum([0, *(split[rank] for split in splits)]).tolist()
    return DataLoader(data, batch_sampler=[range(*pair) for pair in pairwise(ends)])


def off_percent(found: Trained) -> list[float]:
    """Return by how much own time is off in each step, without the first ones."""
    return [
        100 * (step.own_s / own_s - 1)
        for step, own_s in zip(found.steps, found.own_s[:-1], strict=True)
    ][NUM_WARM:]


def fitted(found: list[Trained], cell: Cell) -> dict[str, float]:
    """Predict a step of the third split from those of the first two, each way, and measure it.

    Each part before a collective is taken to be affine in the rank's size. So each step measured
    tells what it would have been at other sizes; the median counts.
    """
    sizes = np.array(cell.splits).T  # by rank and split
    meetings = found[0].steps[NUM_WARM].meetings
    shape = (len(found), -1, len(cell.splits))  # by rank, turn and split, and then by number
    parts = np.array([[step.parts_s for step in each.steps[NUM_WARM:]] for each in found])
    met = np.array([[step.met_s for step in each.steps[NUM_WARM:]] for each in found])
    parts, met = parts.reshape(*shape, len(meetings) + 1), met.reshape(*shape, len(meetings))
    slope = np.median(parts[:, :, 1] - parts[:, :, 0], axis=1)
    slope = slope / (sizes[:, 1] - sizes[:, 0])[:, None]
    ways: dict[str, list[Any]] = {"replay": [], "sum of maxima": []}
    for n in range(2):
        told = parts[:, :, n] + (slope * (sizes[:, 2] - sizes[:, n])[:, None])[:, None]
        transfers_s = met[:, :, n].min(axis=0).sum(axis=-1)  # of whoever is last
        ways["replay"].append(replayed(told, met[:, :, n], meetings))
        ways["sum of maxima"].append(told.max(axis=0).sum(axis=-1) + transfers_s)
    measured = [step.seconds for step in found[0].steps[NUM_WARM + 2 :: 3]]
    return {"measured": median(measured)} | {
        way: float(np.median(values)) for way, values in ways.items()
    }


def replayed(parts: Any, met: Any, meetings: list[Meeting]) -> Any:
    """Return seconds of steps in which a wait ends once every rank has begun its collective.

    Waits come in the order of what they wait for. A transfer is taken to be as long as the shortest
    wait for it, and to take no time of a rank that computes meanwhile.

    Args:
        parts: seconds before each meeting and after the last, by rank, step and number.
        met: seconds of each meeting, likewise.
        meetings: what they are, in all ranks and steps alike.
    """
    at, begun = np.zeros(parts.shape[:2]), deque[Any]()
    for n, meeting in enumerate(meetings):
        at = at + parts[..., n]
        if meeting.calls:
            begun.append(at.max(axis=0))
        if meeting.waits:
            at = np.maximum(at, begun.pop() if meeting.calls else begun.popleft())
        at = at + (met[..., n].min(axis=0) if meeting.waits else met[..., n])
    return (at + parts[..., -1]).max(axis=0)


def answers(cell: Cell, num_steps: int) -> Iterator[Row]:
    """Compare the clock with the truth in one case."""
    name = str(cell)
    progress(name)
    world = len(cell.row_s)
    found = run_workers(world, train, cell, num_steps, True, True, timeout_s=300)
    plain = run_workers(world, train, cell, num_steps, False, False)
    same = [each.losses for each in found] == [each.losses for each in plain]
    yield Row(f"{name}: losses", "those without the clock, bit for bit", {"equal": same}, same)
    off = [off_percent(each) for each in found]
    worst = [max(each, key=abs) for each in off]
    medians = [median(each) for each in off]
    own_ms = [1e3 * median(each.own_s[NUM_WARM::3]) for each in found]
    yield Row(
        f"{name}: error of own time in %, by rank, {len(off[0])} steps",
        "medians within 5",
        {
            "median": np.round(medians, 2).tolist(),
            "worst": np.round(worst, 2).tolist(),
            f"own ms at sizes {cell.splits[0]}": np.round(own_ms, 1).tolist(),
            "load": round(os.getloadavg()[0], 1),
        },
        max(map(abs, medians)) <= 5,
    )
    told = fitted(found, cell)
    error = {way: 100 * (told[way] / told["measured"] - 1) for way in told if way != "measured"}
    yield Row(
        f"{name}: a step at sizes {cell.splits[2]}, fitted to {cell.splits[0]}, {cell.splits[1]}",
        "the replay within 5 %",
        {
            "measured ms": round(1e3 * told["measured"], 1),
            **{f"{way}, %": round(value, 2) for way, value in error.items()},
        },
        abs(error["replay"]) <= 5,
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield each answer as it is ready."""
    for cell in cells():
        if options.only in str(cell) and (not options.quick or str(cell) == QUICK):
            yield from answers(cell, 5 if options.quick else options.steps)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of steps, and which cases."""
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--steps", type=int, default=20, help="of each split, after one more")


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
