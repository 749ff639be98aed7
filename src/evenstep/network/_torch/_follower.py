"""One rank's share of the exchange, step by step: the plan in force, and what was seen of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import final

from ..._exchange._message_kinds import SharesSeen
from ..._exchange._observer import StepObserver
from .._messages import Shares
from .._plans._split import Split
from ._reduce._bucket_job import BucketJob
from ._reduce._observed import lasted_s, ways_to
from ._reduce._reducer import ShardedReducer
from ._reduce._watched import WatchedTransport


@final
class ShareFollower(StepObserver):
    """Has the reducer follow the plans, and notes how long each exchange took.

    Args:
        reducer: sums this rank's share.
        transport: the reducer's, which sees what arrives.
        plans: from rank 0.
        chunk_bytes: bytes that are under way at once.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        reducer: ShardedReducer,
        transport: WatchedTransport,
        plans: Shares,
        *,
        chunk_bytes: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._reducer = reducer
        self._transport = transport
        self._plans = plans
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._epoch = 0
        self._num_exchanges = 0  # under the plan in force
        self._at_s = clock()
        self._num_buckets = 0  # up to the newest backward
        self._begun_s: float | None = None  # the wait for a backward's sums
        self._spent_s = 0.0
        self._waited_s: float | None = None

    def begin_step(self, step: int) -> None:
        """Put the plan of ``step`` in force: the plan point, when no backward is under way."""
        self._reducer.step = step
        self._at_s = self._clock()
        plan = self._plans.at(step)
        if plan is None:
            return
        if plan.epoch != self._epoch:
            self._epoch, self._num_exchanges, split = plan.epoch, 0, None
            if plan.parts is not None:
                split = Split(plan.parts, plan.epoch, chunk_bytes=self._chunk_bytes)
            self._reducer.adopt(split)
        elif self._reducer.split is not None and not plan.is_shared(self._num_exchanges):
            self._reducer.adopt(None)

    def backward_done(self) -> None:
        """Hear that this rank's own backward is done: from now on it waits for its sums, if any."""
        before, self._num_buckets = self._num_buckets, self._reducer.num_buckets
        if self._num_buckets > before:  # none where gradients are only accumulated
            self._begun_s = self._clock()

    def reduced(self) -> None:
        """Hear that it has all sums."""
        begun_s, self._begun_s = self._begun_s, None
        if begun_s is not None:
            self._spent_s, self._waited_s = begun_s - self._at_s, self._clock() - begun_s

    def end_step(self, step: int) -> None:
        """Note what was seen of the step, whose last backward is over."""
        waited_s, self._waited_s = self._waited_s, None
        arrivals = self._transport.take_arrivals()
        if waited_s is not None:
            self._num_exchanges += 1
            plain = self._reducer.split is None
            ways = None if plain else tuple(ways_to(self._transport.rank, arrivals))
            lasting_s = lasted_s(arrivals)
            seen = SharesSeen(step, self._epoch, waited_s, ways, lasting_s, self._spent_s)
            self._plans.note(seen)


@final
class ServerFollower:
    """On a server: notes what came in a step, and passes it on when the next one begins.

    Args:
        transport: the reducer's, which sees what arrives.
        send: takes what was seen of a step.
    """

    def __init__(self, transport: WatchedTransport, send: Callable[[SharesSeen], None]) -> None:
        self._transport = transport
        self._send = send
        self._newest: tuple[int, int] | None = None  # step and plan of the newest bucket

    def hear(self, job: BucketJob) -> None:
        """Hear of a bucket before it is summed: of a new step, once the one before is complete."""
        newest, self._newest = self._newest, (job.step, job.split.epoch)
        if newest in (None, self._newest):
            return
        assert newest is not None
        arrivals = self._transport.take_arrivals()
        rows = tuple(ways_to(self._transport.rank, arrivals))
        self._send(SharesSeen(*newest, math.inf, rows, lasted_s(arrivals)))
