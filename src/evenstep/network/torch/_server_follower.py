"""What a server saw of the workers' pushes, told to rank 0 step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

from .._messages import Seen
from ._reduce._bucket_job import BucketJob
from ._reduce._observed import lasted_s, ways_to
from ._reduce._watched import WatchedTransport


@final
class ServerFollower:
    """Notes what came in a step and passes it on when the next one begins.

    Args:
        transport: the reducer's, which sees what arrives.
        send: takes what was seen of a step.
    """

    def __init__(self, transport: WatchedTransport, send: Callable[[Seen], None]) -> None:
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
        rows = ways_to(self._transport.rank, arrivals)
        self._send(Seen(*newest, math.inf, rows, lasted_s(arrivals)))
