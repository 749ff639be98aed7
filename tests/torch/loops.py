"""What the workers of the loop tests run."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Iterator
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import StepMeasured
from evenstep.exceptions import EvenstepWarning
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime

NUM_SAMPLES = 60
BATCH_SIZE = 10


def stock(num_samples: int = NUM_SAMPLES) -> DataLoader:
    """Return a stock loader over numbered samples."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(num_samples)), batch_size=BATCH_SIZE)


def model() -> nn.Module:
    """Return the same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def gradient(module: nn.Module) -> torch.Tensor:
    """Return all gradients in one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()]).clone()


def reference(first: int) -> torch.Tensor:
    """Return the gradient of the step that starts at sample ``first``, in one process."""
    alone, x = model(), stock().dataset.tensors[0]
    (alone(x[first : first + 2 * BATCH_SIZE]) ** 2).mean().backward()
    return gradient(alone)


def opened(**settings: Any) -> tuple[Balancer, nn.Module, Any]:
    """Return a balancer with sizes 14 and 6, its model and its loader."""
    runtime = Runtime(line_every=None, deadline_s=6.0, hooks=settings.pop("hooks", ()))
    balancer = Balancer(policy=Fixed((14, 6)), runtime=runtime, **settings)
    return balancer, *balancer.prepare(DistributedDataParallel(model()), stock())


def old_iterator(balancer: Balancer, ddp: nn.Module, loader: Any) -> Iterator[int]:
    """Drop an abandoned iterator in the middle of the loop that followed it."""
    old = [iter(loader)]
    next(old[0])
    for step, (x, _) in enumerate(loader):
        old.clear()
        (ddp(x) ** 2).mean().backward()
        yield 2 * BATCH_SIZE * step


def raising_backward(balancer: Balancer, ddp: nn.Module, loader: Any) -> Iterator[int]:
    """Have one backward raise on all ranks, and go on."""
    for step, (x, _) in enumerate(loader):
        if step == 0:
            y = ddp.module(x)
            y.register_hook(lambda grad: 1 / 0)
            try:
                (y**2).mean().backward()
            except ZeroDivisionError:
                ddp.zero_grad()
        (ddp(x) ** 2).mean().backward()
        yield 2 * BATCH_SIZE * step


LOOPS = {
    loop.__name__: loop
    for loop in (
        old_iterator,
        raising_backward,
    )
}


def two_backwards(rank: int) -> tuple[float, ...]:
    """Return compute times where each step has two forwards and two backwards."""
    times: list[tuple[float, ...]] = []

    def hook(event: object) -> None:
        if isinstance(event, StepMeasured):
            times.append(event.compute_s)

    balancer, ddp, loader = opened(hooks=(hook,))
    for x, _ in loader:
        for _ in range(2):
            sleep(0.01 if rank == 0 else 0.06)
            (ddp(x) ** 2).mean().backward()
    balancer.close()
    return times[-1] if times else (0.0, 1.0)


def retained(ddp: nn.Module, x: torch.Tensor) -> None:
    """Two losses of one forward, each with its own backward."""
    out = ddp(x)
    out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def forwards_first(ddp: nn.Module, x: torch.Tensor) -> None:
    """Two forwards, and then their backwards."""
    for loss in [ddp(x).square().mean(), ddp(2 * x).abs().mean()]:
        loss.backward()


def input_first(ddp: nn.Module, x: torch.Tensor) -> None:
    """The gradient of an input, before that of the parameters."""
    loss = ddp(x.requires_grad_()).square().mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def weights_first(ddp: nn.Module, x: torch.Tensor) -> None:
    """The gradient of a weight, which balances two losses as in GradNorm."""
    out = ddp(x)
    losses = [out.square().mean(), out.abs().mean()]
    first = next(ddp.parameters())
    norms = [torch.autograd.grad(loss, first, retain_graph=True)[0].norm() for loss in losses]
    (losses[0] + norms[0] / norms[1] * losses[1]).backward()


def decay_apart(ddp: nn.Module, x: torch.Tensor) -> None:
    """A term that is the same on all ranks, by itself."""
    ddp(x).square().mean().backward()
    sum(parameter.square().sum() for parameter in ddp.parameters()).backward()


def retained_without_sync(ddp: nn.Module, x: torch.Tensor) -> None:
    """Two losses of one forward, reduced by a backward after them."""
    with ddp.no_sync():
        retained(ddp, x)
    ddp(x).square().mean().backward()


def part_alone(ddp: nn.Module, x: torch.Tensor) -> None:
    """A second loss of what a part says by itself."""
    (ddp(x).square().mean() + ddp.module[0](x).abs().mean()).backward()


def part_first(ddp: nn.Module, x: torch.Tensor) -> None:
    """A part makes the input, as an embedding does: weighted at the output."""
    ddp(x + ddp.module[0](x).sum(1, keepdim=True)).square().mean().backward()


def part_unused(ddp: nn.Module, x: torch.Tensor) -> None:
    """A part is looked at."""
    ddp.module[0](x)
    ddp(x).square().mean().backward()


def part_attacked(ddp: nn.Module, x: torch.Tensor) -> None:
    """The gradient of an input through the module itself, which is not weighted."""
    given = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(ddp.module(given).square().sum(), given)
    ddp(x + slope).square().mean().backward()


def part_again(ddp: nn.Module, x: torch.Tensor) -> None:
    """The forward is made again in the backward."""
    hidden = ddp.module[0].forward
    ddp.module[0].forward = lambda given: checkpoint(hidden, given, use_reentrant=False)
    ddp(x.requires_grad_()).square().mean().backward()
    del ddp.module[0].forward


def warnings_of_loops(rank: int) -> dict[str, list[str]]:
    """Return what is said of loops with several backwards in a step, and of calls of parts."""
    said = {}
    once = input_first, weights_first, decay_apart, retained_without_sync
    parts = part_first, part_unused, part_attacked, part_again
    for loop in (retained, forwards_first, *once, part_alone, *parts):
        balancer, ddp, loader = opened()
        with balancer, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, _ in loader:
                loop(ddp, x)
                ddp.zero_grad()
        texts = [str(one.message) for one in caught if one.category is EvenstepWarning]
        words = "outside of the model" if loop.__name__.startswith("part_") else "second backward"
        said[loop.__name__] = [text for text in texts if words in text]
    return said


def lines_warned_of(rank: int) -> list[str]:
    """Return the lines at which a second backward and the call of a part are warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loop in (retained, part_alone):
            balancer, ddp, loader = opened()
            with balancer:
                for x, _ in loader:
                    loop(ddp, x)
    own = [one for one in caught if one.category is EvenstepWarning]
    return [linecache.getline(one.filename, one.lineno).strip() for one in own]


def head_beside(ddp: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    """A head in a DDP of its own."""
    other(ddp(x).repeat(1, 2)).square().mean().backward()


def critic_beside(ddp: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    """A critic that is trained by itself, after the model."""
    ddp(x).square().mean().backward()
    other(x).square().mean().backward()


def encoder_before(ddp: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    """What lies before the model is weighted with it."""
    ddp(other(x).repeat(1, 2)).square().mean().backward()


def copy_filled_in(ddp: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    """An optimizer over copies, whose gradients a script fills in."""
    ddp(x).square().mean().backward()
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)


def warnings_of_others(rank: int) -> dict[str, int]:
    """Return how often a model beside the prepared one is warned of, by loop and policy."""
    said = {}
    for loop in (head_beside, critic_beside, encoder_before, copy_filled_in):
        for policy in (Fixed((14, 6)), "equal"):
            runtime = Runtime(line_every=None, deadline_s=6.0)
            other = DistributedDataParallel(nn.Linear(4, 2).double())
            with (
                Balancer(policy=policy, runtime=runtime) as balancer,
                warnings.catch_warnings(record=True) as caught,
            ):
                warnings.simplefilter("always")
                ddp, loader = balancer.prepare(DistributedDataParallel(model()), stock())
                optimizer = torch.optim.SGD([*ddp.parameters(), *other.parameters()], lr=0.1)
                for x, _ in loader:
                    loop(ddp, other, x)
                    optimizer.step()
                    optimizer.zero_grad()
            words = "belong to no prepared model"
            count = sum(words in str(one.message) for one in caught)
            said[loop.__name__, isinstance(policy, str)] = count
    return said


def uneven_backwards(rank: int) -> float:
    """Return seconds of an epoch of three steps in which ranks foresee unlike things."""
    balancer, ddp, loader = opened(bounds=Bounds(max=5))
    began_s = perf_counter()
    for step in loader.steps():
        loss = 0.0
        for x, _ in step:
            loss = loss + (ddp.module(x) ** 2).mean()
        loss = loss + 0.0 * (ddp(x[:1]) ** 2).mean()
        loss.backward()
        balancer.mean(loss)
    seconds = perf_counter() - began_s
    balancer.close()
    return seconds


def after_close() -> None:
    balancer, _, loader = opened()
    balancer.close()
    next(iter(loader))


def other_group() -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ddp = DistributedDataParallel(model(), process_group=group)
    Balancer().prepare(ddp, stock())


def short_tail() -> None:
    torch.manual_seed(0)
    with_norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Balancer().prepare(DistributedDataParallel(with_norm), stock(43))


def forward_alone() -> None:
    balancer, ddp, loader = opened(bounds=Bounds(max=5))
    with balancer:
        for step in loader.steps():
            for x, _ in step:
                (ddp(x) ** 2).mean().backward()
            ddp(x)  # for a log, and not without gradients


def own_error() -> None:
    balancer, ddp, loader = opened()
    with balancer:
        for x, _ in loader:
            (ddp(x) ** 2).mean().backward()
        dist.barrier()
        if dist.get_rank() == 0:
            raise RuntimeError("my own mistake")


def text_of(mistake: Any) -> str:
    """Return the error that a mistake ends in, with its class."""
    try:
        mistake()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors_of(rank: int) -> dict[str, dict[str, Any]]:
    """Return what was found, by loop and by mistake."""
    found: dict[str, dict[str, Any]] = {}
    for name, loop in LOOPS.items():
        balancer, ddp, loader = opened()
        errors = [0.0]
        for first in loop(balancer, ddp, loader):
            theirs = reference(first)
            errors.append(float((gradient(ddp) - theirs).norm() / theirs.norm()))
            ddp.zero_grad()
        balancer.close()
        found[name] = {"error": max(errors), "steps": len(errors) - 1}
    found["two backwards"] = {"compute_s": two_backwards(rank)}
    found["uneven backwards"] = {"seconds": uneven_backwards(rank)}
    for mistake in (after_close, other_group, short_tail, forward_alone, own_error):
        found[mistake.__name__.replace("_", " ")] = {"text": text_of(mistake)}
    return found
