"""LoRA by the lengths of samples: adapters end where one process ends, and the base stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from evenstep.testing import run_workers
from evenstep.torch import Balancer, Cost, Runtime

from ..torch.cost_epochs import Restless
from .lengths import Table, padding
from .small import distance, gpt_in_double, offline

BATCH_SIZE, NUM_EPOCHS = 12, 3  # of all ranks together; the last step of an epoch is short
KINDS = {
    "plain": Cost("input_ids"),
    "capped forwards": Cost("input_ids", max_size=24),
}


class Lora(nn.Module):
    """A layer that stays as it is, and a product of two small matrices beside it.

    Args:
        base: from ``num_in`` features to ``num_out``.
        num_in: features.
        num_out: features.
    """

    def __init__(self, base: nn.Module, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(num_in, 2, dtype=torch.float64) / num_in)
        self.B = nn.Parameter(torch.zeros(2, num_out, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 4 * (x @ self.A @ self.B)


@dataclass
class Trained:
    """What came of a training.

    Attributes:
        adapters: every A and B, by name.
        first: the same before it.
        base_stayed: whether all other parameters are what they were, to the last bit.
        counts: of the samples that this process computed in each step.
    """

    adapters: dict[str, torch.Tensor]
    first: dict[str, torch.Tensor]
    base_stayed: bool
    counts: list[int]


def adapted() -> Any:
    """Return a GPT with adapters beside two layers of each block; all else is frozen."""
    model = gpt_in_double().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Lora(block.attn.c_attn, 16, 48)
        block.mlp.c_fc = Lora(block.mlp.c_fc, 16, 64)
    return model


def balanced(rank: int, folder: str, world_size: int) -> dict[str, Trained]:
    """Train each kind on some ranks, under costs that change after every step."""
    offline(folder)
    return {name: _balanced(rank, cost, world_size) for name, cost in KINDS.items()}


def alone(rank: int, folder: str) -> dict[str, Trained]:
    """Train each kind in one process, without evenstep."""
    offline(folder)
    return dict.fromkeys(KINDS, _alone())


def _balanced(rank: int, cost: Cost, world_size: int) -> Trained:
    model, counts = adapted(), []
    before = _values(model)
    with Balancer(cost=cost, unit=_targets, runtime=Runtime(line_every=None)) as balancer:
        wrapped, loader = balancer.prepare(model, _loader(BATCH_SIZE // world_size))
        optimizer = _optimizer(model)
        for step in _steps(loader, capped=cost.is_capped):
            if not counts and rank == 0:
                decisions = balancer._session.exchange.decisions
                decisions.planner = Restless(decisions.planner)
            for batch in step:
                wrapped(**batch).loss.backward()
            counts.append(balancer.num_samples)
            optimizer.step()
            optimizer.zero_grad()
    return _trained(model, before, counts)


def _alone() -> Trained:
    model, counts = adapted(), []
    before, optimizer = _values(model), _optimizer(model)
    for (batch,) in _steps(_loader(BATCH_SIZE), capped=False):
        model(**batch).loss.backward()
        counts.append(len(batch["labels"]))
        optimizer.step()
        optimizer.zero_grad()
    return _trained(model, before, counts)


def _trained(model: nn.Module, before: dict[str, torch.Tensor], counts: list[int]) -> Trained:
    after = _values(model)
    moved = {name for name, one in model.named_parameters() if one.requires_grad}
    stayed = all(torch.equal(after[name], before[name]) for name in after.keys() - moved)
    return Trained(
        {name: after[name] for name in moved},
        {name: before[name] for name in moved},
        stayed,
        counts,
    )


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def _targets(batch: Any) -> float:
    return float((batch["labels"][:, 1:] != -100).sum())


def _loader(batch_size: int) -> DataLoader[Any]:
    return DataLoader(
        Table(),
        batch_size,
        shuffle=True,
        collate_fn=padding("DataCollatorForSeq2Seq"),
        generator=torch.Generator().manual_seed(3),
    )


def _steps(loader: Any, *, capped: bool) -> Iterator[Any]:
    for _ in range(NUM_EPOCHS):
        yield from loader.steps() if capped else ([batch] for batch in loader)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    adapters = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.AdamW(adapters, lr=1e-2)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """One process of plain torch, by kind."""
    return run_workers(1, alone, str(tmp_path_factory.mktemp("alone")))[0]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_adapters_are_those_of_one_process(tmp_path, theirs, world_size):
    """Every A and B within 1e-9, under costs that change after every step; nothing else moves."""
    found = run_workers(world_size, balanced, str(tmp_path), world_size)

    for ours, name in ((rank[name], name) for rank in found for name in KINDS):
        assert ours.adapters.keys() == theirs[name].adapters.keys()
        for key, adapter in ours.adapters.items():
            assert distance(adapter, theirs[name].adapters[key]) <= 1e-9
            assert distance(adapter, ours.first[key]) >= 1e-2
        assert ours.base_stayed
    for name in KINDS:
        steps = list(zip(*(rank[name].counts for rank in found), strict=True))
        assert [sum(step) for step in steps] == theirs[name].counts
        assert any(len(set(step)) > 1 for step in steps if sum(step) == BATCH_SIZE)
