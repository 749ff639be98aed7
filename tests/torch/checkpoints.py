"""What the tests of checkpoints save and load, in one process and in several."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from evenstep.exceptions import CheckpointError
from evenstep.torch import Checkpoint


class Net(nn.Module):
    """Layers with buffers, and one whose parameters never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.idle = nn.Linear(3, 3)
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


class Training:
    """A model, its optimizer and a schedule, and steps that depend on nothing else.

    Args:
        folder: of the checkpoints.
        seed: of the parameters to begin with.
        keep: passed on.
    """

    def __init__(self, folder: Path | str, *, seed: int = 0, keep: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = Net().double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.checkpoint = Checkpoint(
            folder,
            model=self.model,
            optimizer=self.optimizer,
            others={"schedule": self.schedule},
            keep=keep,
        )

    def run(self, first: int, end: int) -> None:
        """Do the steps from ``first`` to before ``end``."""
        for step in range(first, end):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def everything(self) -> dict[str, Any]:
        """Return copies of all that a checkpoint holds."""
        copies = {name: value.clone() for name, value in self.model.state_dict().items()}
        moments = self.optimizer.state_dict()["state"]
        for index, values in moments.items():
            copies |= {f"{index}.{name}": value.clone() for name, value in values.items()}
        return {**copies, "lr": torch.tensor(self.optimizer.param_groups[0]["lr"])}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two of ``everything`` are equal, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def sharded(rank: int, folder: str, step: int | None, kind: str) -> tuple[int | None, list[Any]]:
    """Save after a few steps of a model of some kind, or load; return the whole parameters.

    Args:
        rank: this process.
        folder: of the checkpoints.
        step: what to save as; None is to load.
        kind: ``"fsdp"``, ``"ddp"`` or ``"plain"``.
    """
    torch.manual_seed(0 if step is not None else 1)
    model = plain_net()
    if kind == "fsdp":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    checkpoint = Checkpoint(folder, model=model, optimizer=optimizer)
    if step is not None:
        for k in range(3):
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoint.save(step)
        loaded = step
    else:
        loaded = checkpoint.load()
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        tensors += [optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")]
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in tensors]
    return loaded, [each.detach().clone() for each in whole]


class Refusing:
    """Takes up no state on one rank.

    Args:
        error: raised there; None elsewhere.
    """

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.num_loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.num_loaded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.num_loaded += 1


def refused_on_one(rank: int, folder: str, error: Exception) -> tuple[str, bool]:
    """Load where rank 1 refuses; return the error, and whether the model is as it was."""
    torch.manual_seed(0)
    Checkpoint(folder, model=plain_net(), others={"mine": Refusing(None)}).save(1)
    model = plain_net()
    before = [parameter.clone() for parameter in model.parameters()]
    part = Refusing(error if rank == 1 else None)
    try:
        Checkpoint(folder, model=model, others={"mine": part}).load()
    except (CheckpointError, ValueError) as problem:
        same_still = all(map(torch.equal, model.parameters(), before))
        return f"{type(problem).__name__}: {problem}", same_still
    return "nothing happened", False


def apart(rank: int, folder: str) -> str:
    """Save into a folder of each rank's own; return the error."""
    mine = Path(folder) / str(rank)
    try:
        Checkpoint(mine, model=DistributedDataParallel(plain_net())).save(1)
    except CheckpointError as error:
        dist.barrier()
        return str(error)
    return "nothing happened"


def unwritten(rank: int, folder: str) -> str:
    """Save where rank 0 cannot write the index; return the error."""
    model, in_its_place = plain_net(), Path(folder) / ".partial-00000001" / "index.pt"
    if rank == 0:
        model.register_state_dict_post_hook(lambda *_: in_its_place.mkdir(exist_ok=True))
    try:
        Checkpoint(folder, model=model).save(1)
    except CheckpointError as error:
        dist.barrier()
        return str(error)
    return "nothing happened"


class Large:
    """A part with a million numbers, such as the state of an optimizer among the others."""

    def state_dict(self) -> dict[str, Any]:
        return {"moments": torch.zeros(1_000_000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing up."""


def bytes_told(rank: int, folder: str) -> int:
    """Save such a part; return the most bytes that this rank told the others at once."""
    sizes, gather = [], dist.all_gather_object

    def counted(answers: list[Any], value: Any, group: Any = None) -> None:
        sizes.append(len(pickle.dumps(value)))
        gather(answers, value, group=group)

    dist.all_gather_object = counted
    Checkpoint(folder, model=plain_net(), others={"large": Large()}).save(1)
    return max(sizes)
