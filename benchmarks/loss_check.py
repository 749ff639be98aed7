"""Is a loss recognized, and soon, from the scales of its gradients? And is a right one let be?

Models of many forms of loss are trained for some steps, each step's batch in parts of unlike sizes
as ranks would have them. The decision is rank 0's own (``LossTrial``), under both priors: samples
drawn at random, and an order of the user's own. No processes: ranks differ in nothing but samples.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from timeit import timeit
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks._common import Row, main, progress
from evenstep._exchange._loss_checks import LossTrial
from evenstep._planner import Plan
from evenstep._run._step_state import StepState
from evenstep.torch._step._reductions import Look, OutputWatch, look_at
from evenstep.torch._step._tickets import Ticket

STEPS, SOON = 40, 5
SIZES: dict[str, list[tuple[int, ...]]] = {
    "11:5": [(8, 8)] * 2 + [(11, 5)] * STEPS,
    "22:10": [(16, 16)] * 2 + [(22, 10)] * STEPS,
    "88:40": [(64, 64)] * 2 + [(88, 40)] * STEPS,
    "in turn": [(16, 16)] * 2 + [(22, 10), (8, 24), (20, 12), (11, 21)] * (STEPS // 4),
    "four ranks": [(16,) * 4] * 2 + [(28, 16, 12, 8)] * STEPS,
}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _targets(y: torch.Tensor) -> torch.Tensor:
    """Classes of 12 tokens each; of some rows only the first few count."""
    counts = (y[:, None] * 2 + 2) > torch.arange(12)
    return torch.where(counts, (y[:, None] + torch.arange(12)) % 10, -100)


def _tokens(out: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = out[:, None] * torch.linspace(0.5, 1.5, 12)[:, None]
    return functional.cross_entropy(
        logits.flatten(0, 1), _targets(y).flatten(), reduction=reduction
    )


def _pixels(out: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    maps = out[:, :, None, None] * torch.linspace(0.1, 2.0, 36).reshape(6, 6)
    classes = (y[:, None, None] + torch.arange(36).reshape(6, 6)) % 10
    return functional.cross_entropy(maps, classes, reduction=reduction)


def _ctc(out: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
    steps = out.log_softmax(-1).expand(8, *out.shape)
    words = y.clamp(min=1)[:, None].repeat(1, 2)
    full, length = torch.full((len(y),), 8), torch.full((len(y),), 2)
    return functional.ctc_loss(steps, words, full, length, reduction=reduction)


def _focal(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logs = functional.log_softmax(out, 1).gather(1, y[:, None])
    return (-((1 - logs.exp()) ** 2) * logs).mean()


def _signs(y: torch.Tensor) -> torch.Tensor:
    return (y > 6).float()


def _info_nce(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    left = functional.normalize(out)
    right = functional.normalize(functional.one_hot(y, 10).float() + out.detach().roll(1, 1))
    return functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(out)))


def _hard_triplets(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    apart = torch.cdist(out, out)
    same = y[:, None] == y
    far = torch.where(same, apart, 0.0).amax(1)
    near = torch.where(same, 1e9, apart).amin(1)
    return (far - near + 1).clamp(min=0).mean()


_F = functional
MEANS: dict[str, Loss] = {
    "cross entropy": lambda out, y: _F.cross_entropy(out, y),
    "label smoothing": lambda out, y: _F.cross_entropy(out, y, label_smoothing=0.1),
    "class weights": lambda out, y: _F.cross_entropy(out, y, weight=torch.arange(1.0, 11.0)),
    "focal": _focal,
    "tokens": lambda out, y: _tokens(out, y, "mean"),
    "pixels": lambda out, y: _pixels(out, y, "mean"),
    "ctc": lambda out, y: _ctc(out, y, "mean"),
    "squares": lambda out, y: _F.mse_loss(out[:, 0], y / 3.0),
    "absolute values": lambda out, y: _F.l1_loss(out[:, 0], y / 3.0),
    "huber": lambda out, y: _F.huber_loss(out[:, 0], y / 3.0),
    "hinge": lambda out, y: _F.multi_margin_loss(out, y),
    "binary, as a GAN's": lambda out, y: _F.binary_cross_entropy_with_logits(out[:, 0], _signs(y)),
    "over rare positives": lambda out, y: (
        _F.binary_cross_entropy_with_logits(out[:, 0], _signs(y), reduction="sum")
        / _signs(y).sum().clamp(min=1)
    ),
    "distances of rows": lambda out, y: (out - _F.one_hot(y, 10)).norm(dim=1).mean(),
    "divergences": lambda out, y: _F.kl_div(
        out.log_softmax(1), _F.one_hot(y, 10) * 0.9 + 0.01, reduction="batchmean"
    ),
}
SUMS: dict[str, Loss] = {
    "cross entropy": lambda out, y: _F.cross_entropy(out, y, reduction="sum"),
    "tokens": lambda out, y: _tokens(out, y, "sum"),
    "pixels": lambda out, y: _pixels(out, y, "sum"),
    "ctc": lambda out, y: _ctc(out, y, "sum"),
    "huber": lambda out, y: _F.huber_loss(out[:, 0], y / 3.0, reduction="sum"),
    "squares": lambda out, y: _F.mse_loss(out[:, 0], y / 3.0, reduction="sum"),
}
OTHERS: dict[str, Loss] = {
    "the norm of all errors": lambda out, y: (out[:, 0] - y / 3.0).norm(),
    "a mean and a sum": lambda out, y: (
        _F.cross_entropy(out, y) + _F.cross_entropy(out, y, reduction="sum") / 16
    ),
    "pairs: InfoNCE": _info_nce,
    "pairs: hard triplets": _hard_triplets,
}


def found_by(loss: Loss, sizes: list[tuple[int, ...]], seed: int) -> list[tuple[str | None, int]]:
    """Return what each prior finds, and after how many steps of unlike sizes."""
    torch.manual_seed(seed)
    inputs, made = torch.randn(2048, 16), torch.randn(16, 10)
    labels = (inputs @ made + torch.randn(2048, 10)).argmax(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    trials = [LossTrial(len(sizes[0]), at_random=at_random) for at_random in (True, False)]
    found: list[tuple[str | None, int]] = [(None, 0)] * 2
    for parts in sizes:
        columns, order = [], torch.randperm(2048)[: sum(parts)]
        for rows in order.split(list(parts)):
            out = model(inputs[rows])
            looks: list[Look] = []
            out.register_hook(lambda grad, looks=looks: look_at(grad, looks, output=0))
            loss(out, labels[rows]).backward()
            scale, squares = looks[0].values() or (0.0, 0.0)
            columns.append((scale, len(rows), squares / scale**2 - 1 / len(rows)))
        optimizer.step()
        optimizer.zero_grad()
        for number, trial in enumerate(trials):
            if found[number][0] is None:
                told = trial.add(*np.array(columns).T)
                found[number] = told, found[number][1] + (len(set(parts)) > 1)
    return found


def counted(losses: dict[str, Loss], num_seeds: int) -> Iterator[tuple[str, str, Counter[str]]]:
    """Yield for each loss and sizes how many runs found what."""
    for name, loss in losses.items():
        progress(name)
        for pattern, sizes in SIZES.items():
            counts: Counter[str] = Counter()
            for seed in range(num_seeds):
                for found, after in found_by(loss, sizes, seed):
                    counts["runs"] += 1
                    counts[found or "undecided"] += 1
                    counts["soon"] += found is not None and after <= SOON
                    counts["steps"] += after
            yield name, pattern, counts


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows: wrong words first, then how soon, then what it costs."""
    torch.set_num_threads(1)
    num_seeds = 1 if options.quick else 14
    total: Counter[str] = Counter()
    for _, _, counts in counted(MEANS, num_seeds):
        total += counts
    yield Row(
        "means that are called sums",
        "0 of 2,000 runs",
        {"runs": total["runs"], "errors": total["sum"], "warnings": total["between"]},
        total["sum"] == 0 and total["between"] == 0,
    )
    for name, pattern, counts in counted(SUMS, num_seeds):
        part = counts["soon"] / counts["runs"]
        yield Row(
            f"a sum for a mean: {name}, {pattern}",
            f"95 % within {SOON} steps of unlike sizes; never called a mean",
            {
                f"within {SOON}": part,
                "undecided": counts["undecided"],
                "mean steps": counts["steps"] / counts["runs"],
                "called a mean": counts["mean"],
            },
            counts["mean"] == 0 and (True if part >= 0.95 else None),
        )
    for name, pattern, counts in counted(OTHERS, num_seeds):
        told = {key: counts[key] for key in ("sum", "between", "mean", "undecided")}
        yield Row(f"neither: {name}, {pattern}", "reported", told)
    yield from costs()


def costs() -> Iterator[Row]:
    """Yield what one look costs more than the look for numbers that are not finite."""
    for shape in ((16, 10), (64, 1000), (4, 512, 32000)):
        grad, count = torch.randn(shape), 5 if shape[-1] == 32000 else 2000
        times: dict[Any, list[float]] = {None: [], 0: []}
        for _ in range(7):
            for output, seen in times.items():
                look = partial(look_at, grad, [], output=output)
                seen.append(timeit(look, number=count) / count)
        plain_us, ours_us = (1e6 * min(seen) for seen in times.values())
        yield Row(
            f"a look at {' x '.join(map(str, shape))} on a CPU, in steps that are compared",
            "reported; 72 of the first steps, then one of 16",
            {"finite only, us": plain_us, "and the scale, us": ours_us},
        )

    plain_us, ours_us = (
        1e6 * min(timeit(partial(_watched, compares), number=1) for _ in range(15)) / 1000
        for compares in (False, True)
    )
    yield Row(
        "all of the check but sending, a step of the first 1,000, sizes unlike",
        "<= 10 us on the training thread",
        {"us": ours_us - plain_us},
        ours_us - plain_us <= 10,
    )


class _Silent:
    """Stands for the exchange: what it is told costs nothing here."""

    def send(self, messages: Any) -> None: ...


def _watched(compares: bool) -> None:
    """Have a thousand steps of a rank looked at, with or without the check."""
    watch = OutputWatch(_Silent(), compares=compares)  # type: ignore[arg-type]
    plan, grad = Plan(0, 0, (20, 12)), torch.randn(20, 10)
    for number in range(1000):
        step = StepState(number, 20, 32, 0.0, None, plan=plan)
        if watch.resting is not plan:
            watch.begin_step(step)
        looks: list[Look] = []
        look_at(grad, looks, output=0 if step.compares else None)
        watch.note(0, Ticket(step, 20, 1.0, 1.0, is_last=True), looks)
        watch.read()


if __name__ == "__main__":
    main(__doc__.splitlines()[0], rows)
