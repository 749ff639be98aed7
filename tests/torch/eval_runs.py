"""What the workers of the evaluation tests run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Runtime

from .plans import Restless

QUIET = Runtime(line_every=None)


def numbered(length: int, **options: Any) -> DataLoader:
    """Return a stock loader over samples that say which they are."""
    return DataLoader(TensorDataset(torch.arange(length)), **options)


def trained(balancer: Balancer, model: nn.Module, num_steps: int = 2) -> nn.Module:
    """Train a few steps on 4 samples a rank, and return the prepared model."""
    world_size = torch.distributed.get_world_size()
    samples = TensorDataset(torch.randn(4 * world_size * num_steps, 4, dtype=torch.float64))
    model, loader = balancer.prepare(model, DataLoader(samples, batch_size=4))
    for (x,) in loader:
        model(x).square().mean().backward()
    return model


def shares(rank: int) -> dict[str, Any]:
    """Return what rank got of evaluations before and after training, of several kinds."""
    found: dict[str, Any] = {}
    with Balancer(policy=Fixed((9, 2, 1)), runtime=QUIET) as balancer:
        early = balancer.prepare_eval(numbered(30, batch_size=7))
        found["before"] = [batch[0].tolist() for batch in early]
        trained(balancer, nn.Linear(4, 2).double())
        for name, loader in {
            "after": numbered(30, batch_size=7),
            "workers": numbered(30, batch_size=7, num_workers=2, persistent_workers=True),
            "one": numbered(1, batch_size=7),
            "collate": numbered(30, batch_size=7, collate_fn=lambda rows: [r[0] for r in rows]),
            "shuffled": numbered(30, batch_size=7, sampler=RandomSampler(range(30))),
        }.items():
            validation = balancer.prepare_eval(loader)
            for again in ("", " again"):
                length, got = len(validation), []
                for batch in validation:
                    rows = batch if name == "collate" else batch[0]
                    got.append([int(row) for row in rows])
                    assert validation.count == len(rows)
                    validation.add("index", sum(got[-1]) / len(rows))
                assert len(got) == length
                assert validation.count is None
                found[name + again] = got
                found[name + again + " mean"] = validation.mean()["index"]
    return found


def means(rank: int) -> dict[str, Any]:
    """Return exact means beside what one process finds."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(23, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(-1, 2, (23,), generator=generator)
    with Balancer(policy=Fixed((7, 1)), runtime=QUIET) as balancer:
        wrapped = trained(balancer, model)
        validation = balancer.prepare_eval(DataLoader(TensorDataset(x, targets), batch_size=4))
        count, total = 0, 0.0
        with torch.no_grad():
            for inputs, labels in validation:
                output, valid = wrapped(inputs), int((labels >= 0).sum())
                loss = output.square().mean()
                validation.add("loss", loss)
                validation.add("valid", _nll(output, labels), count=valid)
                total, count = total + float(loss) * validation.count, count + validation.count
            whole = model(x)
        if rank:
            validation.add("rank 1 alone", 5.0, count=2)
        found = validation.mean()
        by_hand = balancer.mean(total / count, count=count)
    return {
        "loss": abs(found["loss"] - float(whole.square().mean())),
        "by hand": abs(by_hand - float(whole.square().mean())),
        "valid": abs(found["valid"] - float(_nll(whole, targets))),
        "rank 1 alone": found["rank 1 alone"],
        "bits": [value.hex() for value in found.values()],
    }


def inside(rank: int) -> dict[str, float]:
    """Return errors of gradients and of means where every step is evaluated, in its middle too."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2).double())
    alone = nn.Linear(4, 2).double()
    alone.load_state_dict(model.module.state_dict())
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    worst = {"gradient": 0.0, "mean": 0.0}
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        loader = DataLoader(TensorDataset(x), batch_size=5, num_workers=1)
        validation = balancer.prepare_eval(DataLoader(TensorDataset(x), batch_size=3))
        model, loader = balancer.prepare(model, loader)
        for number, (inputs,) in enumerate(loader):
            if number % 2:
                worst["mean"] = max(worst["mean"], _evaluated(model, validation, alone, x))
            model.zero_grad()
            alone.zero_grad()
            model(inputs).square().mean().backward()
            alone(x[10 * number : 10 * number + 10]).square().mean().backward()
            error = (model.module.weight.grad - alone.weight.grad).norm()
            worst["gradient"] = max(worst["gradient"], float(error))
            worst["mean"] = max(worst["mean"], _evaluated(model, validation, alone, x))
    return worst


def fetched_apart(rank: int) -> list[list[int]]:
    """Return what rank evaluates after each step, when rank 1 has fetched the next one already.

    As where threads fetch, each at its own pace.
    """
    found = []
    with Balancer(policy=Restless(), runtime=QUIET) as balancer:
        validation = balancer.prepare_eval(numbered(30, batch_size=7))
        samples = TensorDataset(torch.ones(80, 4))
        model, loader = balancer.prepare(nn.Linear(4, 2), DataLoader(samples, batch_size=8))
        batches = iter(loader)
        (x,) = next(batches)
        for _ in range(4):
            model(x).square().mean().backward()
            if rank == 1:
                (x,) = next(batches)
            found.append([index for (part,) in validation for index in part.tolist()])
            if rank == 0:
                (x,) = next(batches)
    return found


def _evaluated(model: nn.Module, validation: Any, alone: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        for (inputs,) in validation:
            validation.add("square", model(inputs).square().mean())
        return abs(validation.mean()["square"] - float(alone(x).square().mean()))


def _nll(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, labels, ignore_index=-1)


class Buffered(nn.Module):
    """A model with a buffer, which DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def lockstep(rank: int, kind: str, length: int, lockstep: bool | None) -> dict[str, Any]:
    """Return forwards and mean of an evaluation by a model whose forward is a collective."""
    torch.manual_seed(0)
    x = torch.randn(length, 4, dtype=torch.float64)
    with Balancer(policy=Fixed((7, 1)), runtime=QUIET) as balancer:
        if kind == "fsdp":
            model = trained(balancer, fully_shard(nn.Linear(4, 2).double()))
            alone = nn.Linear(4, 2).double()
            alone.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        else:
            alone = Buffered().double()
            model = trained(balancer, DistributedDataParallel(alone))
        validation = balancer.prepare_eval(
            DataLoader(TensorDataset(x), batch_size=3), lockstep=lockstep
        )
        counts = []
        for _ in range(2):
            counts = []
            with torch.no_grad() if kind != "grad" else torch.enable_grad():
                for (inputs,) in validation:
                    validation.add("square", model(inputs).square().mean())
                    counts.append(validation.count)
                mean = validation.mean()
        with torch.no_grad():
            whole = float(alone(x).square().mean())
    return {"counts": counts, "error": abs(mean["square"] - whole)}


def padded_lengths(rank: int) -> list[list[int]]:
    """Return the lengths in each forward of an evaluation, which its collator pads."""
    lengths = [1 + (7 * index) % 32 for index in range(32)]
    loader = DataLoader(
        [torch.ones(length) for length in lengths],
        batch_size=4,
        collate_fn=partial(pad_sequence, batch_first=True),
    )
    with Balancer(runtime=Runtime(line_every=None)) as balancer:
        shared = balancer.prepare_eval(loader, cost=lengths)
        return [sorted((batch != 0).sum(1).tolist()) for batch in shared]
