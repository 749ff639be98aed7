"""What the workers of the unit tests run, and one process beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

from .models import Mlp
from .plans import Restless

WORLD_SIZE = 3
GLOBAL_BATCH_SIZE = 24
NUM_SAMPLES = 24 * 3 + 2  # the short last step has fewer samples than ranks
QUIET = Runtime(line_every=None)
UNCHECKED = Runtime(line_every=None, checks_loss=False)
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 8.0], dtype=torch.float64)


class Tokens(nn.Module):
    """From tokens to scores of tokens, with a look at the tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embedding(input_ids))[0])


class CausalTokens(Tokens):
    """The same, of a kind that shifts labels, as a model of transformers says it."""

    loss_type = "ForCausalLM"


class MaskedTokens(Tokens):
    """The same, of a kind that does not."""

    loss_type = "ForMaskedLM"


class Texts(Dataset):
    """Rows of tokens as Hugging Face's collators make them, short and long ones.

    Args:
        causal: whether labels repeat the tokens, padded with -100; else some of them are asked
            for, and are others.
        copied: whether they repeat them all the same.
    """

    def __init__(self, *, causal: bool, copied: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(11, (NUM_SAMPLES, 7), generator=generator)
        lengths = torch.randint(1, 8, (NUM_SAMPLES, 1), generator=generator)
        asked = torch.arange(7) < lengths
        if not causal:
            asked &= torch.rand(NUM_SAMPLES, 7, generator=generator) < 0.4
        labels = self.tokens if causal or copied else (self.tokens + 1) % 11
        self.labels = torch.where(asked, labels, -100)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def pairs(*hidden: range) -> TensorDataset:
    """Return features and classes, most of which are hidden at the start of each global batch.

    Args:
        hidden: positions of which all are hidden.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (NUM_SAMPLES,), generator=generator)
    place = torch.arange(NUM_SAMPLES) % GLOBAL_BATCH_SIZE / GLOBAL_BATCH_SIZE
    y[torch.rand(NUM_SAMPLES, generator=generator) > 0.15 + 0.8 * place] = -100
    y[-1] = 2  # not in the short last step: that has a target
    for positions in hidden:
        y[list(positions)] = -100
    return TensorDataset(x, y)


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


def by_hand(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a mean whose gradient over nothing is NaN; torch's own is 0."""
    x, y = batch
    valid = y != -100
    each = -functional.log_softmax(model(x), 1)[torch.arange(len(y)), y.clamp(min=0)]
    return (each * valid).sum() / valid.sum()


def summed_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return a sum, times the workers inside of DDP, which divides by them."""
    x, y = batch
    num_workers = WORLD_SIZE if isinstance(model, DistributedDataParallel) else 1
    return num_workers * functional.cross_entropy(model(x), y, reduction="sum")


def weighted_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y, weight=CLASS_WEIGHTS)


def masked_lm(model: nn.Module, batch: Any) -> torch.Tensor:
    scores = model(batch["input_ids"])
    return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def causal_lm(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss that `ForCausalLMLoss` of transformers computes."""
    scores = model(batch["input_ids"])
    labels = functional.pad(batch["labels"], (0, 1), value=-100)[..., 1:]
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def valid_targets(batch: Any) -> torch.Tensor:
    return (batch[1] != -100).sum()


def class_weights(batch: Any) -> torch.Tensor:
    return CLASS_WEIGHTS[batch[1][batch[1] != -100]].sum()


@dataclass(frozen=True)
class Case:
    """A loss, what it is a mean over, and the loop around it."""

    loss: Callable[[nn.Module, Any], torch.Tensor] = plain_loss
    unit: Any = valid_targets
    data: Callable[[], Dataset] = pairs
    model: Callable[[], nn.Module] = Mlp
    policy: Any = None
    steps: bool = False
    weighting: str = "output"
    reduction: str = "mean"


FIXED = Fixed((14, 6, 4))  # rank 0 has the first 14 positions of each step
CASES = {
    "ignored targets": Case(),
    "class weights": Case(weighted_loss, class_weights),
    "tokens of a masked model": Case(
        masked_lm, "tokens", lambda: Texts(causal=False), MaskedTokens
    ),
    "tokens of a causal model": Case(causal_lm, "tokens", lambda: Texts(causal=True), CausalTokens),
    "tokens of a model that copies": Case(
        masked_lm, "tokens", lambda: Texts(causal=False, copied=True), MaskedTokens
    ),
    "a sum": Case(summed_loss, "samples", reduction="sum"),
    "micro-batches of a sum": Case(summed_loss, "samples", reduction="sum", steps=True),
    "micro-batches": Case(steps=True),
    "explicit weight": Case(weighting="loss"),
    "micro-batches, explicit weight": Case(steps=True, weighting="loss"),
    "a rank without targets": Case(data=lambda: pairs(range(24, 38)), policy=FIXED),
    "a rank without targets, by hand": Case(
        by_hand, data=lambda: pairs(range(24, 38)), policy=FIXED
    ),
    "no targets at all": Case(data=lambda: pairs(range(24, 48))),
    "no targets at all, by hand": Case(by_hand, data=lambda: pairs(range(24, 48))),
}
CONTROLS = {
    "ignored targets": Case(unit="samples"),
    "class weights": Case(weighted_loss, "samples"),
    "tokens of a causal model": Case(causal_lm, "samples", lambda: Texts(causal=True), Tokens),
    "micro-batches": Case(unit="samples", steps=True),
    "a sum": Case(summed_loss, "samples"),
}


def flat_gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double()


def reference(case: Case) -> list[tuple[torch.Tensor, float]]:
    """Return gradient and loss of each step in one process; zeros where nothing is to be learnt."""
    torch.manual_seed(0)
    model, found = case.model().double(), []
    for batch in DataLoader(case.data(), batch_size=GLOBAL_BATCH_SIZE):
        model.zero_grad()
        loss = case.loss(model, batch)
        loss.backward()
        gradient = flat_gradient(model).nan_to_num()
        found.append((gradient, float(loss.detach())))
    return found


def balanced(case: Case) -> tuple[list[tuple[torch.Tensor, float]], list[tuple[int, float | None]]]:
    """Return gradient and logged loss of each step, and this rank's samples and units in it."""
    torch.manual_seed(0)
    found, counts, counted = [], [], []

    def unit(batch: Any) -> float:
        counted.append(float(case.unit(batch)))
        return counted[-1]

    model = DistributedDataParallel(case.model().double())
    stock = DataLoader(case.data(), batch_size=GLOBAL_BATCH_SIZE // WORLD_SIZE)
    with Balancer(
        policy=case.policy or Restless(),
        loss_reduction=case.reduction,
        unit=unit if callable(case.unit) else case.unit,
        bounds=Bounds(max=5) if case.steps else Bounds(),
        runtime=UNCHECKED if case in CONTROLS.values() else QUIET,
    ) as balancer:
        model, loader = balancer.prepare(model, stock, weighting=case.weighting)
        for step in loader.steps() if case.steps else ([batch] for batch in loader):
            model.zero_grad()
            for batch in step:
                loss = case.loss(model, batch)
                (balancer.weight(loss) if case.weighting == "loss" else loss).backward()
            found.append((flat_gradient(model), balancer.mean(loss)))
            counts.append((balancer.num_samples, sum(counted) if counted else None))
            counted.clear()
    return found, counts


def worst_error(case: Case) -> dict[str, Any]:
    """Return the largest relative errors over the steps, and what this rank counted."""
    theirs, (ours, counts) = reference(case), balanced(case)
    assert len(ours) == len(theirs) == 4
    gradients = [
        float((mine - plain).norm() / (plain.norm() or 1.0))
        for (mine, _), (plain, _) in zip(ours, theirs, strict=True)
    ]
    losses = [
        abs(mine - plain)
        for (_, mine), (_, plain) in zip(ours, theirs, strict=True)
        if plain == plain
    ]
    worst = (float(torch.tensor(errors).max()) for errors in (gradients, losses))  # NaN is worst
    return {"gradient": next(worst), "loss": next(worst), "counts": counts}


def errors_of(rank: int) -> dict[str, dict[str, Any]]:
    """Return what was found, by case; controls are named so."""
    controls = {f"control: {name}": case for name, case in CONTROLS.items()}
    return {name: worst_error(case) for name, case in {**CASES, **controls}.items()}


def amp_errors(rank: int) -> tuple[float, float]:
    """Return the error in bf16 under plans that change, and under the equal split."""
    exact = [gradient for gradient, _ in reference(Case())]
    found = []
    for policy in (Restless(), "equal"):
        torch.manual_seed(0)
        module = Mlp().double().float()  # the weights of the reference, rounded
        model = DistributedDataParallel(module)
        stock = DataLoader(pairs(), batch_size=GLOBAL_BATCH_SIZE // WORLD_SIZE)
        square = 0.0
        with Balancer(policy=policy, unit=valid_targets, runtime=QUIET) as balancer:
            model, loader = balancer.prepare(model, stock)
            for gradient, (x, y) in zip(exact, loader, strict=True):
                model.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = functional.cross_entropy(model(x.float()).float(), y)
                loss.backward()
                difference = flat_gradient(model) - gradient
                square += float((difference.norm() / gradient.norm()) ** 2)
        found.append((square / len(exact)) ** 0.5)
    return found[0], found[1]
