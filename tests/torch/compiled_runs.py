"""What the workers of the tests of compiled models run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from time import sleep
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import SizesHeld, StepMeasured
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Bounds, Runtime
from evenstep.torch._model._compiled import hooks_on

from .models import WithBuffers
from .plans import Greedy, Restless

BATCH_SIZE = 8
QUIET = Runtime(line_every=None)


def _in_place(module: nn.Module, **how: Any) -> nn.Module:
    module.compile(**how)
    return module


# What is prepared, and what the user does to it afterwards.
FORMS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module] | None]] = {
    "torch.compile(DDP(model))": (
        lambda m, **how: torch.compile(DistributedDataParallel(m), **how),
        None,
    ),
    "DDP(torch.compile(model))": (
        lambda m, **how: DistributedDataParallel(torch.compile(m, **how)),
        None,
    ),
    "torch.compile(model)": (lambda m, **how: torch.compile(m, **how), None),
    "DDP(model), model.compile()": (
        lambda m, **how: DistributedDataParallel(_in_place(m, **how)),
        None,
    ),
    "ddp.compile()": (lambda m, **how: _in_place(DistributedDataParallel(m), **how), None),
    "compile() of what was prepared": (lambda m, **how: DistributedDataParallel(m), _in_place),
    "torch.compile of what was prepared": (
        lambda m, **how: DistributedDataParallel(m),
        torch.compile,
    ),
}
SHARDED: dict[str, Callable[..., nn.Module]] = {
    "torch.compile(fully_shard(model))": lambda m, **how: torch.compile(fully_shard(m), **how),
    "fully_shard(torch.compile(model))": lambda m, **how: fully_shard(torch.compile(m, **how)),
    "fully_shard(model), model.compile()": lambda m, **how: fully_shard(_in_place(m, **how)),
}
MICRO = ("torch.compile(DDP(model))", "DDP(torch.compile(model))")


def numbered(num_samples: int) -> DataLoader:
    """Return a stock loader over features and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(5, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE)


def gradient(module: nn.Module) -> torch.Tensor:
    whole = (
        parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for parameter in module.parameters()
    )
    return torch.cat([grad.flatten() for grad in whole])


def fresh() -> Any:
    """Forget all graphs, and return a backend that counts them from here on."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.testing.CompileCounterWithBackend("aot_eager")


def exact(rank: int, form: str, loop: str = "plain") -> dict[str, Any]:
    """Train eight steps under plans that change at every one; compare each with one process."""
    backend = fresh()
    torch.manual_seed(0)
    inner, alone = WithBuffers().double(), WithBuffers().double()
    alone.load_state_dict(inner.state_dict())
    before, after = FORMS[form] if form in FORMS else (SHARDED[form], None)
    stock = numbered(2 * BATCH_SIZE * 8)
    x, y = stock.dataset.tensors
    errors, ends = [], []
    bounds = Bounds(max=5 if loop == "steps" else None)
    with Balancer(policy=Restless(), runtime=QUIET, bounds=bounds) as balancer:
        model, loader = balancer.prepare(before(inner, backend=backend), stock)
        if after is not None:
            model = after(model, backend=backend)
        steps = loader.steps() if loop == "steps" else ([batch] for batch in loader)
        num_forwards = 0
        for number, step in enumerate(steps):
            if number == 0:
                run = balancer._session.steps
                done = run.backward_done
                run.backward_done = lambda uses, done=done: (ends.append(0), done(uses))
            model.zero_grad()
            alone.zero_grad()
            for inputs, targets in step:
                num_forwards += 1
                nn.functional.cross_entropy(model(inputs), targets).backward()
            rows = slice(2 * BATCH_SIZE * number, 2 * BATCH_SIZE * (number + 1))
            nn.functional.cross_entropy(alone(x[rows]), y[rows]).backward()
            theirs = gradient(alone)
            errors.append(float((gradient(inner) - theirs).norm() / theirs.norm()))
    breaks = torch._dynamo.utils.counters["graph_break"]
    return {
        "error": max(errors),
        "callbacks": len(ends) / num_forwards,
        "graphs": backend.frame_count,
        "breaks of ours": [reason for reason in breaks if "evenstep" in reason],
        "left": [hook for part in model.modules() for hook in hooks_on(part)],
    }


def timed(rank: int, form: str, late_s: float = 0.06) -> dict[str, list[float]]:
    """Return the times of the rank in time and of the late one, which take turns.

    Rank 0 late makes the others wait in the forward, for its buffers; rank 1 late, in the backward.
    """
    backend = fresh()
    before, after = FORMS[form]
    measured: list[StepMeasured] = []
    hook = lambda event: measured.append(event) if isinstance(event, StepMeasured) else None  # noqa: E731
    runtime = Runtime(line_every=None, hooks=(hook,))
    with Balancer(policy=Fixed((8, 8)), runtime=runtime) as balancer:
        stock = numbered(2 * BATCH_SIZE * 10)
        model, loader = balancer.prepare(before(WithBuffers().double(), backend=backend), stock)
        if after is not None:
            model = after(model, backend=backend)
        for number, (x, _) in enumerate(loader):
            if rank == number % 2:
                sleep(late_s)
            model(x).mean().backward()
    in_time = [event.compute_s[1 - event.step % 2] for event in measured if event.step > 2]
    late = [event.compute_s[event.step % 2] for event in measured if event.step > 2]
    return {"in time": in_time, "late": late, "steps": [event.step for event in measured]}


IN_PARTS = {f"{form}, micro-batches": form for form in MICRO} | {form: form for form in SHARDED}
"""Forms whose steps have micro-batches, by what the tests call them."""


def all_forms(rank: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        name: exact(rank, IN_PARTS[name], "steps") if name in IN_PARTS else exact(rank, name)
        for name in names
    }


def all_slow(rank: int) -> dict[str, Any]:
    return {
        "times": {form: timed(rank, form) for form in FORMS},
        "limits": limits(rank),
        "compiler": slow_compiler(rank),
    }


def loop_over(
    rank: int,
    model: nn.Module,
    *,
    num_samples: int = 2 * BATCH_SIZE * 12 + 7,
    policy: Any = None,
    bounds: Bounds | None = None,
    runtime: Runtime = QUIET,
    num_epochs: int = 1,
) -> list[tuple[int, ...]]:
    """Train ``model`` and return the sizes of all full steps."""
    sizes = []
    steps = bounds is not None and bounds.vary == "count"
    with Balancer(
        policy=policy or Restless(), bounds=bounds or Bounds(), runtime=runtime
    ) as balancer:
        model, loader = balancer.prepare(model, numbered(num_samples))
        for _ in range(num_epochs):
            for step in loader.steps() if steps else ([batch] for batch in loader):
                sizes.append(balancer.batch_sizes)
                for x, y in step:
                    nn.functional.cross_entropy(model(x), y).backward()
                model.zero_grad()
    return sizes


class RowByRow(nn.Module):
    """Unrolled over its samples, so that no graph serves for two sizes, whatever is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.inner(row) for row in x])


def has_sizes(graph: Any) -> bool:
    """Tell whether a graph is one for any size."""
    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    return any(isinstance(value, torch.SymInt) for value in values)


class Normed(nn.Module):
    """A network with local batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def refusal(make: Callable[[], nn.Module]) -> str:
    """Return the error with which a model is refused."""
    try:
        with Balancer(runtime=QUIET) as balancer:
            balancer.prepare(make(), numbered(64))
    except ValueError as error:
        return str(error)
    return "no error"


def refusals(rank: int) -> dict[str, str]:
    def static() -> DistributedDataParallel:
        return DistributedDataParallel(WithBuffers().double(), static_graph=True)

    def reduced_inside() -> nn.Module:
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            return DistributedDataParallel(WithBuffers().double())

    def late() -> str:
        try:
            with Balancer(runtime=QUIET) as balancer:
                model, loader = balancer.prepare(static(), numbered(64))
                model.compile(backend="eager")
                next(iter(loader))
        except ValueError as error:
            return str(error)
        return "no error"

    return {
        "static": refusal(lambda: torch.compile(static(), backend="eager")),
        "static in place": refusal(lambda: _in_place(static(), backend="eager")),
        "reduced inside": refusal(reduced_inside),
        "twice": refusal(lambda: _twice()),
        # Last: the rank that raises first ends the run, and with it the other's process group.
        "static, compiled late": late(),
    }


def _twice() -> nn.Module:
    """Return a model that another balancer has prepared already."""
    model = _in_place(DistributedDataParallel(WithBuffers().double()), backend="eager")
    Balancer(runtime=QUIET).prepare(model)
    return model


def limits(rank: int) -> dict[str, Any]:
    """Return what becomes of models to which every size costs a graph, and of others."""
    found: dict[str, Any] = {}
    backend = fresh()
    with torch._dynamo.config.patch(error_on_recompile=True):
        model = DistributedDataParallel(
            torch.compile(WithBuffers().double(), fullgraph=True, backend=backend)
        )
        sizes = loop_over(rank, model)
        found["marked"] = len(set(sizes)), backend.frame_count, has_sizes(backend.graphs[0])
        backend = fresh()
        compiled = torch.compile(WithBuffers().double(), backend=backend)
        by_count = Bounds(vary="count", granularity=2)
        model = DistributedDataParallel(compiled)
        sizes = loop_over(rank, model, bounds=by_count, num_samples=16 * 12)
        found["by count"] = len(set(sizes)), backend.frame_count, has_sizes(backend.graphs[0])
    backend, events = fresh(), []
    runtime = Runtime(line_every=None, hooks=(events.append,))
    with (
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model = DistributedDataParallel(torch.compile(RowByRow().double(), backend=backend))
        found["sizes"] = loop_over(rank, model, runtime=runtime, num_epochs=3)
    found["graphs"] = backend.frame_count
    found["held"] = [event for event in events if isinstance(event, SizesHeld)]
    found["warnings"] = [str(warning.message) for warning in caught]
    for name, make in (("smallest", WithBuffers), ("smallest, normed", Normed)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.compile(make().double(), backend=(backend := fresh()))
            found[name] = loop_over(rank, model, policy=Greedy(), num_samples=16 * 7)[-1]
    found["graphs, normed"] = backend.frame_count
    found["marked without need"] = marked_without_need(rank)
    return found


def marked_without_need(rank: int) -> list[bool]:
    """Return for every forward of a model that is not compiled whether its input was marked."""
    fresh()
    model, marked = WithBuffers().double(), []
    model.register_forward_pre_hook(
        lambda module, inputs: marked.append(hasattr(inputs[0], "_dynamo_weak_dynamic_indices"))
    )
    loop_over(rank, DistributedDataParallel(model), num_samples=16 * 3)
    return marked


def slow_compiler(rank: int) -> list[int]:
    """Return the steps measured where rank 1 compiles for longer than the deadline, twice."""
    fresh()

    def backend(graph: Any, inputs: Any) -> Any:
        if rank == 1:
            sleep(2.0)
        return graph

    model = torch.compile(WithBuffers().double(), backend=backend)
    measured: list[int] = []
    hook = lambda event: measured.append(event.step) if isinstance(event, StepMeasured) else None  # noqa: E731
    runtime = Runtime(line_every=None, deadline_s=0.9, heartbeat_s=0.2, hooks=(hook,))
    with Balancer(policy=Restless(), runtime=runtime) as balancer:
        model, loader = balancer.prepare(model, numbered(16 * 8))
        for number, (x, y) in enumerate(loader):
            sleep(0.01 * rank)  # expected late, so that the other waits where losses have a name
            if number == 4 and rank == 1:
                torch._dynamo.reset()
            nn.functional.cross_entropy(model(x), y).backward()
    return measured
