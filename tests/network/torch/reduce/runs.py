"""What the workers of the tests of the sharded aggregation run."""

from __future__ import annotations

import copy
import pickle
from contextlib import closing, nullcontext
from datetime import timedelta
from time import monotonic
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evenstep.network import Split, traffic_bytes
from evenstep.network._torch._hook import shard_gradients
from evenstep.network._torch._reducer import ShardedReducer
from evenstep.network._torch._transport import GlooTransport
from evenstep.network._torch._watched import LEAST_BYTES, WatchedTransport, ways_to

SHARES = (
    (0.25, 0.25, 0.25, 0.25),
    (1 / 3, 1 / 3, 1 / 3, 0.0),
    (0.0, 1.0, 0.0, 0.0),
    (0.1, 0.0, 0.2, 0.7),
)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def open_reducer(ranks: list[int] | None = None, **options: Any) -> ShardedReducer:
    """Return a reducer over a gloo group of its own."""
    group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=60))
    return ShardedReducer(GlooTransport(group), **options)


def split_of(shares: Any, epoch: int, **settings: Any) -> Split:
    """Return a split with chunks so small that there are several."""
    given = np.array(shares, float)
    return Split.of(
        given / given.sum(), epoch=epoch, **{"chunk_bytes": 1 << 14, "min_bytes": 64, **settings}
    )


def randoms(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's gradients."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def sums(rank: int) -> dict[str, Any]:
    """Sum the same by several splits in turn, in all types, sizes and formats."""
    found: dict[str, Any] = {"traffic": [], "bitwise": [], "plain": {}}
    epoch = 0
    with open_reducer() as reducer:
        for dtype in FLOATS:
            results = []
            for shares in SHARES:
                reducer.adopt(split_of(shares, epoch := epoch + 1))
                before = reducer.sent_bytes
                results.append(reducer.reduce(randoms(rank, 30_011, dtype)).wait())
                reducer.settle()
                if dtype == torch.float32:
                    found["traffic"].append(reducer.sent_bytes - before)
            found["bitwise"] += [torch.equal(result, results[0]) for result in results]
            found["plain"][dtype] = _difference(results[0], randoms(rank, 30_011, dtype))
        found["tiny"] = [_by(reducer, rank, size).tolist() for size in (1, 2, 3, 5)]
        wild = randoms(rank, 4000)
        wild[7 + rank], wild[1000] = float("nan"), float("inf") * (1 - 2 * (rank % 2))
        found["wild"] = reducer.reduce(wild).wait().numpy()
        reducer.settle()
    return found


def watched(rank: int) -> dict[str, Any]:
    """Sum the same with and without a look at what arrives, and return what was seen."""
    shares, size = (0.5, 0.5, 0.0), 500_000
    split = split_of(shares, 1, chunk_bytes=1 << 18, min_bytes=LEAST_BYTES)
    results = []
    with open_reducer() as reducer:
        reducer.adopt(split)
        results.append(reducer.reduce(randoms(rank, size)).wait())
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    with (
        closing(WatchedTransport(GlooTransport(group))) as transport,
        ShardedReducer(transport) as reducer,
    ):
        reducer.adopt(split)
        dist.barrier()
        begin_s = monotonic()
        results.append(reducer.reduce(randoms(rank, size)).wait())
        reducer.settle()
        within_s = monotonic() - begin_s
        arrivals = transport.take_arrivals()
    return {
        "same": torch.equal(*results),
        "bytes": sum(one.num_bytes for one in arrivals),
        "planned": traffic_bytes(split, size, 4, workers=range(3))[1],
        "seconds": max(seconds for *_, seconds in ways_to(rank, arrivals)),
        "within_s": within_s,
    }


def _by(reducer: ShardedReducer, rank: int, size: int) -> torch.Tensor:
    result = reducer.reduce(torch.full((size,), float(rank))).wait()
    reducer.settle()
    return result


def _difference(mean: torch.Tensor, mine: torch.Tensor) -> float:
    """Return how far ``mean`` is from that of an all-reduce in double precision."""
    total = mine.double()
    dist.all_reduce(total)
    return float((mean.double() - total / dist.get_world_size()).abs().max())


def wires(rank: int) -> dict[str, Any]:
    """Sum in 16 bits by two splits."""
    found = {}
    for wire in (torch.bfloat16, torch.float16):
        with open_reducer(wire=wire) as reducer:
            results = []
            for epoch, shares in enumerate(SHARES):
                reducer.adopt(split_of(shares, epoch))
                results.append(reducer.reduce(randoms(rank, 30_011)).wait())
                reducer.settle()
            found[wire] = [result.numpy() for result in results], reducer.sent_bytes
    return found


class Net(nn.Module):
    """Some layers, the last of which may be left out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(24, 24, dtype=dtype) for _ in range(4))
        self.extra = nn.Linear(24, 24, dtype=dtype)

    def forward(self, x: torch.Tensor, *, extra: bool) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.extra(x) if extra else x


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "never": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "no_sync": {},
    "clipped": {},
    "bfloat16": {},
    "float64": {},
    "autocast": {},
    "nan": {},
    "sometimes_all_reduce": {},
}


def options(rank: int) -> dict[str, tuple[float, float]]:
    """Train with each option by plain DDP and by shares; return how far apart, and how far."""
    found = {}
    with open_reducer() as reducer:
        for number, name in enumerate(OPTIONS):
            plain = _train(rank, name, None, number)
            ours = _train(rank, name, reducer, number)
            apart = max(
                float((a.double() - b.double()).abs().nan_to_num(99.0).max())
                for a, b in zip(plain, ours, strict=True)
            )
            if name == "nan":
                lost = [[bool(a.isnan().any()) for a in some] for some in (plain, ours)]
                apart = float(lost[0] != lost[1] or not any(lost[1]))
            moved = max(
                float((a.double() - b.double()).abs().max())
                for a, b in zip(Net(ours[0].dtype).parameters(), ours, strict=True)
            )
            found[name] = apart, moved
    return found


def _train(rank: int, name: str, reducer: ShardedReducer | None, number: int) -> list[torch.Tensor]:
    """Train for four steps, by another split in each; return the parameters."""
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(name, torch.float32)
    model = DistributedDataParallel(Net(dtype), bucket_cap_mb=0.004, **OPTIONS[name])
    if reducer is not None:
        shard_gradients(model, reducer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if reducer is not None:
            skips = name == "sometimes_all_reduce" and step % 2
            shares = np.roll([1, 2, 0], step)
            split = split_of(shares, 10 * number + step, chunk_bytes=1000, min_bytes=16)
            reducer.adopt(None if skips else split)
        for micro in range(2):
            extra = name != "never" and (name != "unused" or bool(step % 2))
            waits = name == "no_sync" and micro == 0
            if micro and name != "no_sync":
                break
            x = randoms(10 * step + 3 * micro + rank, 24 * 5).reshape(5, 24).to(dtype)
            if name == "nan" and step == 2 and rank == 1:
                x[0, 0] = float("nan")
            with model.no_sync() if waits else nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                    loss = model(x, extra=extra).square().mean()
                loss.backward()
        if name == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.module.parameters()]


def on_a_device(rank: int) -> float:
    """Return how far gradients by shares on a device are from those of plain DDP."""
    gradients = []
    with open_reducer() as reducer:
        for shards in (False, True):
            model = DistributedDataParallel(Net(torch.float32).cuda(), bucket_cap_mb=0.004)
            if shards:
                shard_gradients(model, reducer)
                reducer.adopt(split_of([1, 2], 0, chunk_bytes=1000, min_bytes=16))
            model(randoms(rank, 240).reshape(10, 24).cuda(), extra=True).square().sum().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())


def copies(rank: int) -> tuple[bool, str, str]:
    """A model with the hook is copied and pickled; a second hook, a wrong group are refused."""
    with open_reducer() as reducer:
        model = DistributedDataParallel(nn.Linear(3, 3))
        shard_gradients(model, reducer)
        reducer.adopt(split_of([1, 1], 0))
        model(torch.ones(1, 3)).sum().backward()
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        works = all(bool((m(torch.ones(1, 3)) == model(torch.ones(1, 3))).all())
                    for m in (copied, pickled))  # fmt: skip
        again = _refused(lambda: shard_gradients(model, reducer))
        alone = dist.new_group([0]), dist.new_group([1])
        other = DistributedDataParallel(nn.Linear(3, 3), process_group=alone[rank])
        wrong = _refused(lambda: shard_gradients(other, reducer))
    return works, again, wrong


def _refused(call: Any) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing happened"


def serve(rank: int, workers: list[int], shares: list[float]) -> dict[str, Any]:
    """Ranks without data serve; return gradients by each split on workers, bytes on all."""
    group = dist.new_group(workers)
    found: dict[str, Any] = {"gradients": []}
    with open_reducer(workers=workers) as reducer:
        if rank not in workers:
            reducer.serve()
        else:
            model = DistributedDataParallel(Net(torch.float32), process_group=group)
            shard_gradients(model, reducer)
            orders = [shares, shares[::-1], None, [1.0] * len(shares)]
            for epoch, given in enumerate(orders):
                reducer.adopt(None if given is None else split_of(given, epoch, min_bytes=4))
                before = reducer.sent_bytes
                model(randoms(rank, 24).reshape(1, 24), extra=True).sum().backward()
                if epoch == 0:
                    found["sent"] = reducer.sent_bytes - before
                found["gradients"].append(
                    torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()
                )
                model.zero_grad()
        found["traffic"] = reducer.sent_bytes, reducer.received_bytes
    return found
