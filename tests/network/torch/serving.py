"""Training with ranks that hold no data and only sum gradients."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from evenstep.events import Event, LinksMeasured, SharesPlanned
from evenstep.exceptions import WorkerLostError
from evenstep.policies import Fixed
from evenstep.torch import Balancer, Checkpoint, Drain, Network, Runtime
from evenstep.torch._exchange._startup import WorkerFacts, gather_facts

from .networks import WIDTH, draw_shares, make_model

NUM_STEPS = 6
SIZES = 2, 5, 8
CHUNK_BYTES = 1 << 16
WATCHFUL = Runtime(deadline_s=2.0, heartbeat_s=0.2, line_every=None)


def stock(num_steps: int = NUM_STEPS, sizes: tuple[int, ...] = SIZES) -> DataLoader[Any]:
    torch.manual_seed(1)
    samples = torch.randn(sum(sizes) * num_steps, WIDTH, dtype=torch.float64)
    return DataLoader(TensorDataset(samples), batch_size=sum(sizes) // len(sizes))


def sent_bytes(balancer: Balancer) -> int:
    return 0 if balancer._parts.reduction is None else balancer._parts.reduction.reducer.sent_bytes


def served(
    rank: int, servers: tuple[int, ...], how: str, two: bool = False, dtype: Any = torch.float64
) -> dict[str, Any]:
    """Run one script on all ranks for two epochs; return what it ends with here.

    Args:
        rank: of the process group.
        servers: who serves.
        how: is said about it: ``"argument"``, ``"environment"``, ``"own DDP"``, or ``"plain"`` for
            all-reduce.
        two: whether to train two models, with two micro-batches a step and ``no_sync``.
        dtype: of the parameters.
    """
    os.environ["EVENSTEP_ROLE"] = "server" if how == "environment" and rank in servers else ""
    network = Network(servers=None if how == "environment" else servers, chunk_bytes=CHUNK_BYTES)
    num_ranks, num_steps, planner = 3 + len(servers), 0, None
    models = [make_model(dtype) for _ in range(1 + two)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    with Balancer(
        policy=Fixed(SIZES),
        runtime=Runtime(line_every=None),
        network=None if how == "plain" else network,
    ) as balancer:
        wrapped: list[nn.Module] = list(models)
        if how == "own DDP":
            wrapped = [DistributedDataParallel(m, process_group=balancer.workers) for m in models]
        *wrapped, loader = balancer.prepare(*wrapped, stock())
        validation = balancer.prepare_eval(DataLoader(range(20), batch_size=4))
        for _ in range(2):
            for step in loader.steps():
                if rank == 0 and planner is None and how != "plain":
                    planner = draw_shares(balancer, num_ranks)
                for (x,) in step:
                    sum(model(x).square().mean() for model in wrapped).backward()
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
            for batch in validation:
                validation.add("mean", batch.double().mean())
        mean = validation.mean()["mean"]
        found = {"is_server": balancer.is_server, "sent": sent_bytes(balancer)}
        found["own_mean"] = balancer.mean(rank, count=1.0)
        balancer.average_buffers()
    parameters = torch.cat([p.detach().ravel() for model in models for p in model.parameters()])
    found |= {"parameters": parameters.tolist(), "steps": num_steps, "mean": mean}
    found["length"] = len(loader)
    found["seen"] = [] if planner is None else planner.seen
    return found


def measured(rank: int, only_servers: bool) -> tuple[list[Any], list[Any]]:
    """Return what links were measured and which parts planned, with rank 3 as a server."""
    events: list[Event] = []
    network = Network(servers=(3,), only_servers=only_servers)
    loud = Runtime(line_every=None, hooks=(events.append,))
    with Balancer(policy=Fixed(SIZES), runtime=loud, network=network) as balancer:
        model = nn.Sequential(nn.Linear(WIDTH, 2048), nn.Linear(2048, 256)).double()
        wrapped, loader = balancer.prepare(model, stock(12))
        for (x,) in loader:
            wrapped(x).square().mean().backward()
    links = [event for event in events if isinstance(event, LinksMeasured)]
    return links, [event.parts for event in events if isinstance(event, SharesPlanned)]


def bereft(rank: int, victim: int, number: signal.Signals) -> str:
    """One of five goes in the middle of an exchange; return what the others, two servers, hear."""
    try:
        with Balancer(
            runtime=WATCHFUL, network=Network(servers=(3, 4), chunk_bytes=CHUNK_BYTES)
        ) as balancer:
            model, loader = balancer.prepare(make_model(torch.float64), stock(400))
            if rank == victim == 3:
                goes_at_a_push(balancer, number)
            planner = None
            for (x,) in loader:
                if rank == 0 and planner is None:
                    planner = draw_shares(balancer, 5)
                loss = model(x).square().mean()
                assert balancer._parts.reduction is not None
                if rank == victim and balancer._parts.reduction.reducer.split is not None:
                    os.kill(os.getpid(), number)
                loss.backward()
    except WorkerLostError as error:
        return str(error)
    return "nothing"


def goes_at_a_push(balancer: Balancer, number: signal.Signals) -> None:
    """Have this server go once it has asked for a worker's push, and before it has it."""
    assert balancer._parts.reduction is not None
    transport = balancer._parts.reduction._transport._transport
    receive = transport.receive

    def gone(buffer: torch.Tensor, source: int, tag: int) -> Any:
        pending = receive(buffer, source, tag)
        if buffer.nbytes > 1000:
            os.kill(os.getpid(), number)
        return pending

    transport.receive = gone  # type: ignore[method-assign]


def refused(rank: int) -> dict[str, str]:
    """Return what is said of roles that cannot be, by case."""
    cases: dict[str, tuple[Network | None, str]] = {
        "beyond": (Network(servers=(2, 3)), ""),
        "too many": (Network(servers=(1, 2)), ""),
        "unlike": (Network(servers=(2 if rank == 1 else 1,)), ""),
        "first": (Network(), "server" if rank == 0 else ""),
        "no role": (Network(), "sever" if rank == 2 else "worker"),
        "no network": (None, "server" if rank == 1 else ""),
        "some": (Network() if rank == 1 else None, ""),
        "overruled": (Network(servers=()), "server" if rank == 2 else ""),
        "none": (Network(only_servers=True), ""),
        "wide": (Network(servers=(2,)), ""),
    }
    told = {}
    for case, (network, role) in cases.items():
        os.environ["EVENSTEP_ROLE"] = role
        model: nn.Module = make_model(torch.float32)
        model = DistributedDataParallel(model) if case == "wide" else model
        with Balancer(network=network, runtime=WATCHFUL) as balancer:
            try:
                balancer.prepare(model)
                told[case] = "nothing"
            except ValueError as error:
                told[case] = str(error)
    return told


def left_open(rank: int, destroys: bool) -> int:
    """Return the steps of a script that never closes its balancer, at its end."""
    balancer = Balancer(runtime=WATCHFUL, network=Network(servers=(2,), chunk_bytes=CHUNK_BYTES))  # type: ignore[arg-type]
    model, loader = balancer.prepare(make_model(torch.float64), stock(3, SIZES))
    num_steps = 0
    for (x,) in loader:
        model(x).square().mean().backward()
        num_steps += 1
    if destroys:
        dist.destroy_process_group()
    balancer._say_goodbye()  # what the end of a process calls
    return num_steps


def counting(rank: int) -> str:
    """Train until a number of steps is reached, which no server ever reaches."""
    step = 0
    with Balancer(
        runtime=WATCHFUL, network=Network(servers=(2,), chunk_bytes=CHUNK_BYTES)
    ) as balancer:
        model, loader = balancer.prepare(make_model(torch.float64), stock(3))
        try:
            while step < 5:
                for (x,) in loader:
                    model(x).square().mean().backward()
                    step += 1
        except SystemExit as ended:
            return f"exit {ended.code}"
    return "trained"


def stopping_early(rank: int) -> tuple[int, str]:
    """Leave the epochs by a loss, which a server has not; return how many were begun, and more."""
    loss = None
    with Balancer(
        runtime=WATCHFUL, network=Network(servers=(2,), chunk_bytes=CHUNK_BYTES)
    ) as balancer:
        model, loader = balancer.prepare(make_model(torch.float64), stock(3))
        for epoch in range(8):
            for (x,) in loader:
                loss = model(x).square().mean()
                loss.backward()
            if loss is not None and epoch == 1:
                break
    return epoch + 1, "what comes after the loop"


def checkpointed(rank: int, folder: str) -> tuple[int, list[float], str]:
    """Load, train three steps and save in the middle; return the step begun with, what was
    loaded, and where it was saved."""
    model = make_model(torch.float64)
    with Balancer(
        runtime=WATCHFUL, network=Network(servers=(2,), chunk_bytes=CHUNK_BYTES)
    ) as balancer:
        wrapped, loader = balancer.prepare(model, stock(6))
        checkpoint = Checkpoint(folder, model=wrapped, loader=loader, balancer=balancer)
        first = step = checkpoint.load() or 0
        loaded = next(model.parameters()).detach().ravel().tolist()
        for (x,) in loader:
            wrapped(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
            step += 1
            if step == 3:
                where = checkpoint.save(step)
                break
        if balancer.is_server:
            where = checkpoint.save(3)
    return first, loaded, where.name if first == 0 else ""


def followed(rank: int) -> list[float]:
    """Return the parameters after some steps in mixed precision, clipped, with a scaler."""
    model = make_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with Balancer(
        runtime=WATCHFUL, network=Network(servers=(2,), chunk_bytes=CHUNK_BYTES)
    ) as balancer:
        wrapped, loader = balancer.prepare(model, stock(6))
        for i, (x,) in enumerate(loader):
            if rank == 0 and not i:
                draw_shares(balancer, 3)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = wrapped(x.float()).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return torch.cat([p.detach().ravel() for p in model.parameters()]).tolist()


def in_turn(rank: int) -> list[int]:
    """Return the steps made under two balancers, one after the other."""
    nums = []
    for _ in range(2):
        with Balancer(
            runtime=WATCHFUL, network=Network(servers=(2,), chunk_bytes=CHUNK_BYTES)
        ) as balancer:
            model, loader = balancer.prepare(make_model(torch.float64), stock(3))
            nums.append(0)
            for (x,) in loader:
                model(x).square().mean().backward()
                nums[-1] += 1
    return nums


def grouped(rank: int) -> tuple[int, list[str]] | None:
    """Return the steps made by ranks 1 to 3, the second of which serves, and how they are named."""
    ranks = dist.new_group([1, 2, 3])
    if rank == 0:
        return None
    network, num_steps = Network(servers=(1,), chunk_bytes=CHUNK_BYTES), 0
    runtime = replace(WATCHFUL, process_group=ranks)
    with Balancer(runtime=runtime, network=network) as balancer:
        model, loader = balancer.prepare(make_model(torch.float64), stock(3, (2, 6)))
        crew = balancer._join()
        facts = gather_facts(crew, WorkerFacts.here(torch.device("cpu"), lag=0))
        names = [name.partition(facts[0].host)[2] for name in crew.hosts(facts)]
        for (x,) in loader:
            model(x).square().mean().backward()
            num_steps += 1
    return num_steps, names


def failing(rank: int, victim: int) -> str:
    """One worker's script fails in a step; return what the others, a server too, hear of it."""
    try:
        with Balancer(
            runtime=WATCHFUL, network=Network(servers=(2,), chunk_bytes=CHUNK_BYTES)
        ) as balancer:
            model, loader = balancer.prepare(make_model(torch.float64), stock(40))
            for i, (x,) in enumerate(loader):
                if rank == victim and i == 9:
                    raise ZeroDivisionError("of the script's own")
                model(x).square().mean().backward()
    except (WorkerLostError, ZeroDivisionError) as error:
        return str(error)
    return "nothing"


def drained(rank: int) -> tuple[int, bool]:
    """Return the steps made until the server, which gets SIGTERM in the third, has all stop.

    And whether rank 0 heard of it in that very step, in which no order goes to the server.
    """
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    step, heard = 0, True
    with (
        Balancer(
            runtime=WATCHFUL, network=Network(servers=(2,), chunk_bytes=CHUNK_BYTES)
        ) as balancer,
        Drain(balancer) as drain,
    ):
        model, loader = balancer.prepare(make_model(torch.float64), stock(400))
        for (x,) in loader:
            model(x).square().mean().backward()
            step += 1
            if rank == 0 and step == 3:
                os.kill(pids[2], signal.SIGTERM)
                answers, until_s = balancer._session.exchange._answers, monotonic() + 10.0
                while not answers.stop_asked and monotonic() < until_s:
                    sleep(0.01)
                heard = answers.stop_asked
            if drain.requested:
                break
    return step, heard
