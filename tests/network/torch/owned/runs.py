"""What the workers of the tests of the sharded optimizer run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from evenstep.network import Split
from evenstep.network.torch import ShardedOptimizer
from evenstep.network.torch._reduce._hook import shard_gradients
from evenstep.torch import Checkpoint

from ..reduce.runs import open_reducer

Make = Callable[[Any], optim.Optimizer]

MAKES: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "plain SGD": lambda p: optim.SGD(p, lr=0.1),
    "Adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
}
PLANS = ((1, 2, 1), (1, 0, 4), (0, 0, 1), (0, 0, 1), (3, 3, 1), (0, 1, 0), (5, 1, 2))


def split_of(shares: Any, epoch: int = 0, **settings: Any) -> Split:
    """Return a split with messages so small that there are several."""
    given = np.array(shares, float)
    return Split.of(
        given / given.sum(), epoch=epoch, **{"chunk_bytes": 3000, "min_bytes": 0, **settings}
    )


class Net(nn.Module):
    """Parameters of all kinds: of other types and layouts, without elements, never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv2d(8, 20, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.LayerNorm(300)
        self.sixteen = nn.Linear(70, 30, dtype=torch.bfloat16)
        self.wide = nn.Linear(37, 41, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.idle = nn.Linear(50, 3)
        self.rare = nn.Linear(33, 17)

    def groups(self) -> list[dict[str, Any]]:
        """Weights with weight decay, and the rest without."""
        parameters = list(self.parameters())
        return [
            {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in parameters if each.dim() <= 1], "lr": 0.003},
        ]

    def give_gradients(self, step: int, *, laid: bool = False) -> None:
        """Set the gradients of a step, the same wherever it is; some have none.

        They lie as the parameters do if ``laid``; torch's fused kernels need it, where channels
        come last, and do not say so.
        """
        generator = torch.Generator().manual_seed(step)
        for name, parameter in self.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            has = not name.startswith("idle") and (step % 3 == 1 or not name.startswith("rare"))
            gradient = drawn.to(parameter.dtype)
            gradient = torch.empty_like(parameter).copy_(gradient) if laid else gradient
            parameter.grad = gradient.detach() if has else None


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether all parameters are equal bit for bit."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def same_state(one: Any, other: Any) -> bool:
    """Return whether two nested states are equal, types and bits of tensors included."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    return bool(one == other)


def state_bytes(optimizer: ShardedOptimizer) -> int:
    """Return what this rank keeps in memory of tensors over elements."""
    values = [value for state in optimizer._shards.states.values() for value in state.values()]
    return sum(value.untyped_storage().nbytes() for value in values if value.dim())


def follow(rank: int) -> dict[str, list[tuple[bool, bool]]]:
    """Step with every optimizer under plan after plan, beside torch's own.

    Return for each step whether parameters are the same, and whether the states are.
    """
    found: dict[str, list[tuple[bool, bool]]] = {}
    for name, make in MAKES.items():
        found[name] = []
        model = Net()
        plain = copy.deepcopy(model)
        reference = make(plain.groups())
        optimizer = ShardedOptimizer(make(model.groups()), split_of(PLANS[0]))
        for step, shares in enumerate(PLANS):
            if step:
                optimizer.replan(split_of(shares, step))
            model.give_gradients(step, laid="fused" in name)
            plain.give_gradients(step, laid="fused" in name)
            optimizer.step()
            reference.step()
            states = same_state(optimizer.state_dict(), reference.state_dict())
            found[name].append((same(model, plain), states))
    return found


def hand_over(rank: int, folder: str, first: int, end: int, shares: list[float]) -> bool:
    """Step from ``first`` to ``end``, on from what is in ``folder``, which is left there.

    Return whether parameters and state are those of torch's own from the start, and each rank
    keeps its share of the state alone.
    """
    file = Path(folder) / "state.pt"
    model, plain = Net(), Net()
    reference = MAKES["AdamW"](plain.groups())
    for step in range(end):
        plain.give_gradients(step)
        reference.step()
    optimizer = ShardedOptimizer(MAKES["AdamW"](model.groups()), split_of(shares))
    if first:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, end):
        model.give_gradients(step)
        optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    share = shares[rank] / sum(shares)  # of what is kept: its own part, and no view of the whole
    kept = state_bytes(optimizer) / sum(2 * each.nbytes for each in model.parameters())
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": state}, file)
    return kept <= share + 0.05 and same(model, plain) and same_state(state, reference.state_dict())


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(30, 30)
        self.out = nn.Linear(30, 30)
        self.out.weight = self.into.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.into(x)))


def train(rank: int, sharded: bool, reduced: bool) -> dict[str, Any]:
    """Train as users do: DDP, a scaler, clipping, schedulers, closures, settings changed by hand.

    Return parameters, losses and learning rates, and what became of a step that was infinite.
    Gradients are summed by shares as well if ``reduced``.
    """
    model = Tied()
    ddp = DistributedDataParallel(model)
    with open_reducer() as reducer:
        if reduced:
            reducer.adopt(split_of([1, 0, 3]))
            shard_gradients(ddp, reducer)
        return _trained(rank, model, ddp, sharded)


def _trained(rank: int, model: Tied, ddp: DistributedDataParallel, sharded: bool) -> dict[str, Any]:
    optimizer: optim.Optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if sharded:
        optimizer = ShardedOptimizer(optimizer, split_of([1, 0, 3]))
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses, rates = [], []
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = ddp(x * (float("inf") if step == 3 else 1.0)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if sharded and step == 4:
            optimizer.replan(split_of([0, 2, 1], 1))
        if step == 5:
            optimizer.param_groups[0]["lr"] *= 0.5
        rates.append(optimizer.param_groups[0]["lr"])

    def closure() -> float:
        optimizer.zero_grad()
        loss = ddp(torch.ones(2, 30)).square().mean()
        loss.backward()
        return loss.item()

    losses.append(optimizer.step(closure))
    late = ddp(torch.ones(2, 30)).square().mean()
    optimizer.step()
    try:
        late.backward()
        stale = ""
    except RuntimeError as error:
        stale = str(error)
    return {
        "parameters": [each.detach().numpy().copy() for each in model.parameters()],
        "losses": losses,
        "rates": rates,
        "scale": scaler.get_scale(),
        "stale": "modified by an inplace operation" in stale,
    }


def pairs(rank: int) -> tuple[bool, str]:
    """Two optimizers in turn, over every second rank; return whether all went well, and an error.

    The ranks of a pair have the same gradients, and the pairs other ones.
    """
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    models, plains = [Net(), Net()], [Net(), Net()]
    makes = [MAKES["AdamW"], MAKES["SGD"]]
    optimizers = [
        ShardedOptimizer(make(model.groups()), split_of([1, 3]), process_group=group)
        for make, model in zip(makes, models, strict=True)
    ]
    references = [make(plain.groups()) for make, plain in zip(makes, plains, strict=True)]
    for step in range(4):
        for each in (models[step % 2], plains[step % 2]):
            each.give_gradients(10 * step + rank % 2)
        optimizers[step % 2].step()
        references[step % 2].step()
    optimizers[0].param_groups[0]["lr"] = 0.1 * rank
    try:
        optimizers[0].step()
    except RuntimeError as error:
        return all(map(same, models, plains)), str(error)
    return False, "nothing happened"


def measure(rank: int) -> list[tuple[int, int, int, int]]:
    """Return by plan: bytes of state, and sent in a step, in the step to the plan, and received."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = ShardedOptimizer(optim.AdamW(model.parameters()), split_of([1, 1, 1, 1]))
    rows = []
    for epoch, shares in enumerate([(1, 1, 1, 1), (4, 2, 1, 1), (2, 1, 1, 0), (0, 0, 0, 1)]):
        begun = optimizer.traffic
        optimizer.replan(split_of(shares, epoch))
        moved = optimizer.traffic
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        ended = optimizer.traffic
        sent = ended.sent_bytes - moved.sent_bytes
        received = ended.received_bytes - moved.received_bytes
        rows.append(
            (state_bytes(optimizer), sent, received, moved.received_bytes - begun.received_bytes)
        )
    return rows


def checkpointed(
    rank: int, folder: str, until: int, shares: list[float] | None, name: str = "AdamW"
) -> tuple[int, bool, bool]:
    """Train on from the last checkpoint to step ``until`` and save; plainly without shares.

    Return where it began, whether all is as in an unbroken run, and whether saving before the
    first step leaves no trace.
    """
    model, plain = Net(), Net()
    del model.none, plain.none  # torch's checkpoints save no such thing
    reference = MAKES[name](plain.groups())
    optimizer = MAKES[name](model.groups())
    if shares is not None:
        optimizer = ShardedOptimizer(optimizer, split_of(shares))
    checkpoint = Checkpoint(folder, model=model, optimizer=optimizer)
    begun = checkpoint.load() or 0
    if not begun:
        checkpoint.save(0)
    untouched = bool(begun) or not optimizer.state
    for step in range(until):
        plain.give_gradients(step)
        reference.step()
        if step >= begun:
            model.give_gradients(step)
            optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(until)
    states = same_state(optimizer.state_dict(), reference.state_dict())
    return begun, same(model, plain) and states, untouched


def part(rank: int, how: str) -> str:
    """Have rank 1 do something else than the others; return the error, and that all can go on."""
    model = Net()
    optimizer = ShardedOptimizer(MAKES["AdamW"](model.groups()), split_of([1, 1, 1]))
    model.give_gradients(0)
    optimizer.step()
    odd = rank == 1
    before = copy.deepcopy(list(model.parameters()))
    try:
        if how == "settings" and odd:
            optimizer.param_groups[0]["lr"] = 0.5
        if how == "gradients" and odd:
            model.rare.weight.grad = torch.ones_like(model.rare.weight)
        if how == "plans":
            optimizer.replan(split_of([2 if odd else 1, 1, 1], 1))
        elif how == "place" and odd:
            optimizer.state_dict()
        else:
            optimizer.step()
    except RuntimeError as error:
        said = str(error)
    else:
        return "nothing happened"
    untouched = all(map(torch.equal, before, model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.01
    model.give_gradients(1)
    optimizer.step()  # nothing was under way: whoever mends it can go on
    totals = [each.double().sum() for each in model.parameters()]
    mine = torch.stack(totals)
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    return said if untouched and torch.equal(mine, theirs) else "it left something behind"
