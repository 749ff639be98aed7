"""A preference loss, a mean over pairs, beside a mean over tokens: exact if one is a sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.policies import Fixed
from evenstep.torch import Balancer, Runtime

NUM_STEPS, GLOBAL, LENGTH, VOCABULARY, BETA = 4, 16, 12, 11, 0.1
Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Scores(nn.Module):
    """Scores of the next token, for chosen and rejected answers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY))

    def forward(
        self, chosen: torch.Tensor, rejected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(chosen.clamp(min=0)), self.inner(rejected.clamp(min=0))


def answers() -> TensorDataset:
    """Chosen and rejected answers of unlike lengths, padded with -100."""
    generator = torch.Generator().manual_seed(1)
    shape = 2, NUM_STEPS * GLOBAL, LENGTH
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (*shape[:2], 1), generator=generator)
    return TensorDataset(*tokens.masked_fill(torch.arange(LENGTH) >= lengths, -100))


def loss_of(*batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of scores and answers: a mean over pairs beside one over tokens."""
    pairs, tokens, count = terms(*batch)
    return pairs + tokens / count


def terms(
    of_chosen: torch.Tensor, of_rejected: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor
) -> Terms:
    """Return the mean over pairs, the sum over the tokens of what was chosen, and their number."""
    good, bad = (
        -functional.cross_entropy(scores[:, :-1].mT, answer[:, 1:], reduction="none")
        for scores, answer in ((of_chosen, chosen), (of_rejected, rejected))
    )
    margin = BETA * (good.sum(1) - bad.sum(1))
    return -functional.logsigmoid(margin).mean(), -good.sum(), (chosen[:, 1:] != -100).sum()


def plain(balancer: Balancer, pairs: torch.Tensor, tokens: torch.Tensor, count: torch.Tensor):
    return pairs + tokens / count


def one_weighted(
    balancer: Balancer, pairs: torch.Tensor, tokens: torch.Tensor, count: torch.Tensor
):
    dist.all_reduce(count)
    return balancer.weight(pairs) + tokens * dist.get_world_size() / count


FORMS: dict[str, tuple[Callable[..., torch.Tensor], str, object]] = {
    "one of them weighted": (one_weighted, "loss", "samples"),
    "by samples": (plain, "output", "samples"),
    "by tokens": (plain, "output", lambda batch: (batch[0][:, 1:] != -100).sum()),
}


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def errors(rank: int) -> dict[str, float]:
    """Return the largest relative error over the steps against one process, by form."""
    return {name: _error(*form) for name, form in FORMS.items()}


def _error(form: Callable[..., torch.Tensor], weighting: str, unit: object) -> float:
    torch.manual_seed(0)
    alone = Scores().double()
    torch.manual_seed(0)
    model, worst = Scores().double(), 0.0
    runtime = Runtime(line_every=None)
    with Balancer(policy=Fixed((11, 5)), unit=unit, runtime=runtime) as balancer:
        balanced, loader = balancer.prepare(
            DistributedDataParallel(model),
            DataLoader(answers(), batch_size=GLOBAL // 2),
            weighting=weighting,
        )
        for whole, batch in zip(DataLoader(answers(), GLOBAL), loader, strict=True):
            alone.zero_grad()
            model.zero_grad()
            loss_of(*alone(*whole), *whole).backward()
            form(balancer, *terms(*balanced(*batch), *batch)).backward()
            wanted = gradient(alone)
            worst = max(worst, float((gradient(model) - wanted).norm() / wanted.norm()))
    return worst
