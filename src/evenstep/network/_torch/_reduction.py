"""The sharded aggregation of a run: made with its first model, and following its plans by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import final

import numpy as np
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..._exchange._exchange import Exchange
from ..._exchange._message_kinds import SharesReport
from ..._private_torch import process_groups
from ..._run._step_state import StepObserver
from ...events import Hook
from ...exceptions import invalid
from .._following._share_planner import SharePlanner
from .._messages import Shares
from .._plans._aggregation import Aggregation
from .._plans._share_plan import Split
from ._hook import BucketState, shard_gradients
from ._network_settings import Network
from ._pipeline import BucketJob
from ._reducer import ShardedReducer
from ._transport import GlooTransport
from ._watched import WatchedTransport, lasted_s, ways_to


@final
class Reduction(StepObserver):
    """This rank's reducer, the group that it sends over, and what it sees of each step.

    On a worker, the reducer follows the plans of shares, and each exchange is noted for rank 0.

    Args:
        network: what the user asked for.
        group: of all ranks, servers among them, over gloo and for nothing else; closed with it.
        order: ranks of the group, workers first.
        num_workers: how many of them train.
        timeout_s: how long a rank may keep another one waiting.

    Attributes:
        reducer: sums this rank's share; to be started.
        shares: this worker's side of the plans; None before ``join``.
    """

    def __init__(
        self,
        network: Network,
        group: dist.ProcessGroup,
        *,
        order: Sequence[int],
        num_workers: int,
        timeout_s: float,
    ) -> None:
        self._network = network
        self._num_workers = num_workers
        self._group = group
        self._ddps: list[DistributedDataParallel] = []
        self._hooks: list[BucketState] = []
        # Ranks are numbered as the heartbeats do, which notice losses too: among a balancer's own.
        self._transport = WatchedTransport(GlooTransport(group, order=order))
        self.shares: Shares | None = None
        self.reducer = ShardedReducer(
            self._transport,
            workers=range(num_workers),
            wire=network.wire,
            timeout_s=timeout_s,
        )
        self._chunk_bytes = 0
        self._epoch = 0
        self._num_exchanges = 0  # under the plan in force
        self._at_s = 0.0
        self._num_buckets = 0  # up to the newest backward
        self._begun_s: float | None = None  # the wait for a backward's sums
        self._spent_s = 0.0
        self._waited_s: float | None = None

    def attach(self, ddp: DistributedDataParallel | None) -> None:
        """Have the gradients of a model go through the reducer.

        Raises:
            ValueError: it is in no DDP, has a communication hook, or has sparse gradients.
        """
        if ddp is None:
            raise invalid(
                "Balancer(network=...)",
                "be used with models in DDP",
                "another one, such as of FSDP, which sums its gradients by itself",
                "Leave `network` out.",
            )
        if not self.reducer.is_worker:
            return  # a server's own has nothing to sum
        self._hooks.append(shard_gradients(ddp, self.reducer))
        self._ddps.append(ddp)

    def join(self, exchange: Exchange, *, lag: int, emit: Hook) -> None:
        """Take part in a run, on all workers: observe its steps from now on.

        Args:
            exchange: of the run, before its first step.
            lag: steps by which a plan of sizes trails its measurement.
            emit: takes events, on rank 0.
        """
        num_servers = self._group.size() - self._num_workers
        self.shares = Shares(
            self._num_workers,
            send_all=exchange.send_to_workers,
            lag=lag,
            emit=emit,
            num_servers=num_servers,
        )
        exchange.add(self.shares)
        exchange.lost_ranks.on_loss = self.reducer.fail
        self._chunk_bytes = self._network.chunk_bytes_of(self._num_bytes())

    def begin_step(self, step: int) -> None:
        """Put the plan of ``step`` in force: the plan point, when no backward is under way."""
        assert self.shares is not None
        self.reducer.step = step
        self._at_s = perf_counter()
        plan = self.shares.at(step)
        if plan is None:
            return
        if plan.epoch != self._epoch:
            self._epoch, self._num_exchanges, split = plan.epoch, 0, None
            if plan.parts is not None:
                split = Split(plan.parts, plan.epoch, chunk_bytes=self._chunk_bytes)
            self.reducer.adopt(split)
        elif self.reducer.split is not None and not plan.is_shared(self._num_exchanges):
            self.reducer.adopt(None)

    def backward_done(self) -> None:
        """Note that this rank's own backward is done: from now on it waits for its sums, if any."""
        before, self._num_buckets = self._num_buckets, self.reducer.num_buckets
        if self._num_buckets > before:  # none where gradients are only accumulated
            self._begun_s = perf_counter()

    def reduced(self) -> None:
        """Note that this rank has all sums."""
        begun_s, self._begun_s = self._begun_s, None
        if begun_s is not None:
            self._spent_s, self._waited_s = begun_s - self._at_s, perf_counter() - begun_s

    def end_step(self, step: int) -> None:
        """Note what was seen of the step, whose last backward is over."""
        assert self.shares is not None
        waited_s, self._waited_s = self._waited_s, None
        arrivals = self._transport.take_arrivals()
        if waited_s is not None:
            self._num_exchanges += 1
            plain = self.reducer.split is None
            ways = None if plain else tuple(ways_to(self._transport.rank, arrivals))
            lasting_s = lasted_s(arrivals)
            seen = SharesReport(step, self._epoch, waited_s, ways, lasting_s, self._spent_s)
            self.shares.note(seen)

    def lead(self) -> None:
        """On rank 0: plan shares from now on."""
        assert self.shares is not None, "`join` comes first"
        num_bytes = self._num_bytes()
        chunks = max(1, round(num_bytes / self._network.chunk_bytes_of(num_bytes)))
        is_worker = np.arange(self._group.size()) < self._num_workers
        aggregation = Aggregation(
            self._group.size(),
            num_bytes,
            num_chunks=chunks,
            is_worker=is_worker,
            is_server=~is_worker if self._network.only_servers else None,
        )
        margin = self._network.margin
        self.shares.lead(SharePlanner(self._network.policy, aggregation, margin=margin))

    def serve(self, send: Callable[[SharesReport], None]) -> None:
        """On a server: sum until training has ended; ``send`` takes what was seen of each step.

        Raises:
            WorkerLostError: a rank was lost.
        """
        newest: tuple[int, int] | None = None  # step and plan of the newest bucket

        def on_bucket(job: BucketJob) -> None:
            """Note a bucket before it is summed; at a new step, send what was seen of the last."""
            nonlocal newest
            before, newest = newest, (job.step, job.split.epoch)
            if before is not None and before != newest:
                arrivals = self._transport.take_arrivals()
                rows = tuple(ways_to(self._transport.rank, arrivals))
                send(SharesReport(*before, math.inf, rows, lasted_s(arrivals)))

        self.reducer.serve(on_bucket)

    def close(self) -> None:
        """End the reducer and its group; the models continue with plain all-reduce."""
        for hook in self._hooks:
            hook.reducer = None  # DDP has no way to take its hook off
        self.reducer.close()
        self._transport.close()
        if self._group in process_groups():
            dist.destroy_process_group(self._group)

    def _num_bytes(self) -> int:
        """Return the bytes of all gradients as they travel."""
        wire = self._network.wire
        trained = (each for ddp in self._ddps for each in ddp.parameters() if each.requires_grad)
        return sum(each.numel() * (wire or each.dtype).itemsize for each in trained)
