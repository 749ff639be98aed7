"""What the workers of the tests of drawn indices run: a loop as nanoGPT has it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.torch import Balancer, Checkpoint, DrawnIndices, Runtime

from .plans import Restless

HIGH, SIZE, STOPS_AFTER = 101, 24, 5
QUIET = Runtime(line_every=None)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    generator = torch.Generator().manual_seed(5)
    model = nn.Linear(6, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch_of(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors that share no memory with the indices, as of a file that is read."""
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(HIGH, 9, generator=generator, dtype=torch.float64)
    return data[indices, :6], data[indices, 6:]


def updates(model: Any, optimizer: Any, draws: Any, num: int, *, ahead: bool) -> None:
    """Make so many updates, each of two micro-steps; only the second reduces gradients."""
    draws = iter(draws)
    x, y = batch_of(next(draws))
    for _ in range(num):
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            loss = (model(x) - y).square().mean() / 2
            if ahead:
                x, y = batch_of(next(draws))
            loss.backward()
            if not ahead:
                x, y = batch_of(next(draws))
        optimizer.step()
        optimizer.zero_grad()


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def in_one_process(num: int, *, ahead: bool) -> torch.Tensor:
    """Return the parameters after so many updates with whole batches."""
    model, optimizer = made()
    updates(model, optimizer, DrawnIndices(HIGH, SIZE), num, ahead=ahead)
    return parameters(model)


def in_parts(rank: int, folder: str, num: int, ahead: bool) -> dict[str, Any]:
    """Go on from the checkpoint in a folder, if there is one, and write the next one."""
    plain, optimizer = made()
    world_size, sizes = dist.get_world_size(), []
    with Balancer(SIZE, policy=Restless(), runtime=QUIET) as balancer:
        model, draws = balancer.prepare(
            DistributedDataParallel(plain), DrawnIndices(HIGH, SIZE // world_size)
        )
        checkpoint = Checkpoint(
            Path(folder), model=plain, optimizer=optimizer, loader=draws, balancer=balancer
        )
        begun = checkpoint.load() or 0
        model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
        updates(model, optimizer, draws, num, ahead=ahead)
        checkpoint.save(begun + num)
    return {"sizes": sizes, "parameters": parameters(plain)}


def with_dropout(rank: int, num: int) -> torch.Tensor:
    """Return the parameters after updates with dropout by sample."""
    torch.manual_seed(rank)
    inner = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    size = SIZE // dist.get_world_size()
    runtime = replace(QUIET, sample_seed=3)
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.fill_(0.1).view(-1)[0] = 0.3
    with Balancer(SIZE, policy=Restless(), runtime=runtime) as balancer:
        model, draws = balancer.prepare(DistributedDataParallel(inner), DrawnIndices(HIGH, size))
        updates(model, optimizer, draws, num, ahead=True)
    return parameters(inner)


def leaving_out(rank: int, named: bool) -> torch.Tensor | str:
    """Leave out each third batch, on all ranks; return the parameters, or the error."""
    inner, optimizer = made()
    size = SIZE // dist.get_world_size()
    try:
        with Balancer(SIZE, policy=Restless(), runtime=QUIET) as balancer:
            model, draws = balancer.prepare(
                DistributedDataParallel(inner), DrawnIndices(HIGH, size)
            )
            for number, indices in zip(range(24), draws, strict=False):
                if number % 3 == 2:
                    continue
                x, y = batch_of(indices)
                with balancer.step(indices) if named else nullcontext():
                    loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return parameters(inner)


def plain(rank: int) -> dict[str, Any]:
    """Draw with ``EVENSTEP=off``, and go on from a state."""
    os.environ["EVENSTEP"] = "off"
    with Balancer(runtime=QUIET) as balancer:
        _, draws = balancer.prepare(nn.Linear(1, 1), DrawnIndices(HIGH, 4))
        batches = iter(draws)
        found = [next(batches) for _ in range(5)]
        draws.load_state_dict(draws.state_dict())
        left = len(next(iter(draws)))
    return {"sizes": [len(b) for b in found], "most": int(torch.cat(found).max()), "left": left}
