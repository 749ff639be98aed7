"""One rank's side of the sharded aggregation: buckets in, their means or one error out."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self, final

import torch

from ..._types import check_range
from ...exceptions import WorkerLostError, invalid
from .._plans._share_plan import Split
from ._orders import (
    check_epoch,
    orders,
    send_order,
)
from ._pipeline import BucketJob, Pipeline, travels_in
from ._transport import AbstractTransport, PeerFailed, Pending, Timeouts

_TAG = 1
_NONE = -1
_SEND_S = 1.0  # a peer that is stopped takes nothing in


@final
class Failure:
    """Turns the first failure into the error of all that follows, and ends the waits of all ranks.

    A rank that finds another one lost says so to the rest before it breaks off. They see its
    connection close, and would name it, but for the notice that came before: a receive from every
    other rank is posted at the start, and read when something failed.

    Args:
        transport: carries gradients, matched by tag; it is broken off.
    """

    def __init__(self, transport: AbstractTransport) -> None:
        self._transport = transport
        self._rank = transport.rank
        self._notices: dict[int, torch.Tensor] = {}  # of whom each other rank finds lost
        self._receipts: list[Pending] = []
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def start(self) -> None:
        """Listen to what others find out."""
        peers = [rank for rank in range(self._transport.world_size) if rank != self._rank]
        self._notices = {peer: torch.full((1,), _NONE) for peer in peers}
        self._receipts = [
            self._transport.receive(buffer, peer, _TAG) for peer, buffer in self._notices.items()
        ]

    def on(self, error: BaseException) -> BaseException:
        """Return the error to raise, from any thread; the first time, notify all and break off."""
        with self._lock:
            if self.error is None:
                lost, self.error = self._judge(error)
                self._notify(lost)
                self._transport.break_off()
        return self.error

    def check(self) -> None:
        """Raise what ended the exchange, if anything did.

        Raises:
            WorkerLostError: a rank was lost.
            BaseException: something else happened.
        """
        if self.error is not None:
            raise self.error

    def _judge(self, error: BaseException) -> tuple[int, BaseException]:
        """Return who is lost, or out of step, and the error to raise for it."""
        if isinstance(error, WorkerLostError):
            return error.rank, error
        if not isinstance(error, PeerFailed):
            return self._rank, error
        notices = [(peer, int(lost)) for peer, lost in self._notices.items() if int(lost) != _NONE]
        reporter, lost = notices[0] if notices else (self._rank, error.peer)
        if not notices:
            problem = str(error)
        elif lost == reporter:
            problem = "it stopped after an error of its own, or ended early"
        elif lost == self._rank:
            problem = f"rank {reporter} timed out waiting for this rank"
        else:
            problem = f"rank {reporter} reported it"
        return lost, WorkerLostError(
            lost,
            f"Rank {lost} was lost in the exchange of gradients: {problem}. Restart the run from "
            f"its last checkpoint; if the rank was only slow, raise `Runtime(hang_s=...)`.",
        )

    def _notify(self, lost: int) -> None:
        """Send ``lost`` to all others who can still be reached, within moments."""
        notice, sent = torch.tensor([lost]), list[Pending]()
        for peer in self._notices.keys() - {lost}:
            with suppress(RuntimeError):
                sent.append(self._transport.send(notice, peer, _TAG))
        for pending in sent:
            with suppress(RuntimeError):
                pending(_SEND_S)


_STOP_S = 5.0  # at the close, for a server that takes no more orders


@final
class ShardedReducer:
    r"""Averages gradients over workers, each server summing the part that its split gives it.

    Workers push each server's range to it, servers sum in the order of the ranks and divide by the
    number of workers, and all workers pull. Whichever split is in force, the result is the same
    bit for bit, and it is that of an all-reduce up to the rounding of its order of summation.
    ``with`` it, or call ``start`` and ``close``: one daemon thread issues all messages, one beside
    it looks at the clock.

    Right where links differ and push and pull overlap, as ``evenstep.network.plan_shares`` finds
    out; on equal links all-reduce is as fast or faster, and ``adopt(None)`` goes back to it.
    Wrong for sparse gradients, and for several backwards at once.

    Args:
        transport: between all ranks, servers without data among them, and for nothing else.
        workers: ranks of the transport that have gradients; None is all. The first of them leads:
            it notifies the others, who serve, of what comes.
        wire: 16 bits in which gradients travel; None sends them as they are.
        timeout_s: how long a rank may keep another one waiting, as a group's timeout.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        transport: AbstractTransport,
        *,
        workers: Sequence[int] | None = None,
        wire: torch.dtype | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        world_size = transport.world_size
        self._workers = tuple(range(world_size)) if workers is None else tuple(sorted(workers))
        check_range("ShardedReducer(timeout_s=...)", timeout_s, "positive", "Use 1800.")
        self._transport = transport
        self._wire = wire
        self._failure = Failure(transport)
        self._split: Split | None = None
        self._epoch = -1
        self.step = 0  # under way, for ranks without data; set by what counts them
        self.num_buckets = 0  # that came so far, those of plain all-reduce too; counted by the hook
        self._changed = threading.Condition()  # `_num_unreported` fell
        self._num_unreported = 0  # buckets whose end is still to be reported
        self._num_running = 0  # those that are not done
        self._begun: set[object] = set()  # models that are in the middle of a backward
        self._pid: int | None = None  # of the process that started
        self._closed = False
        self._timeouts = Timeouts(timeout_s, give_up=self._give_up)
        self._pipeline = Pipeline(
            transport,
            workers=self._workers,
            timeouts=self._timeouts,
            prepare=self._prepare,
            on_error=self._failure.on,
        )
        others = [rank for rank in range(world_size) if rank not in self._workers]
        # Whom this rank notifies of every bucket.
        self._notified = others if transport.rank == self._workers[0] else []
        self._num_orders = 0

    @property
    def is_worker(self) -> bool:
        """Whether this rank has gradients."""
        return self._transport.rank in self._workers

    @property
    def num_workers(self) -> int:
        """How many ranks have gradients."""
        return len(self._workers)

    @property
    def split(self) -> Split | None:
        """What is in force; None is plain all-reduce."""
        return self._split

    @property
    def is_idle(self) -> bool:
        """Whether no bucket is under way."""
        return not self._num_unreported

    @property
    def sent_bytes(self) -> int:
        """What this rank sent so far; plain all-reduce is not counted."""
        return self._pipeline.sent_bytes

    @property
    def received_bytes(self) -> int:
        """What it received, likewise."""
        return self._pipeline.received_bytes

    def start(self) -> None:
        """Start the threads. May be called again."""
        self._check_open()
        if self._pid is None:
            self._pid = os.getpid()
            self._failure.start()
            self._timeouts.start()
            self._pipeline.start()
            atexit.register(self.close)

    def adopt(self, split: Split | None) -> None:
        """Sum by ``split`` from the next bucket on; call it between steps, with the same on all.

        Buckets that are under way keep theirs. Nothing migrates.

        Args:
            split: of a later epoch than all before. None is plain all-reduce over DDP's own group.

        Raises:
            ValueError: it is of another number of ranks, or no later than one in force before.
            RuntimeError: buckets are under way.
        """
        self._check_open()
        if self._num_running or self._begun:
            raise RuntimeError(
                "`ShardedReducer.adopt(split)` came in the middle of a backward: the ranks would "
                "part. Call it between steps, before the forward."
            )
        if split is not None:
            if split.world_size != self._transport.world_size:
                rule = f"have a part for each of {self._transport.world_size} ranks"
                got = f"{split.world_size} parts"
                raise invalid("ShardedReducer.adopt(split)", rule, got, "Count servers too.")
            if split.epoch == self._epoch and split != self._split:
                rule = f"be of a later epoch than {self._epoch}, which is in force"
                raise invalid("ShardedReducer.adopt(split)", rule, split, "Number plans upwards.")
            check_epoch("ShardedReducer.adopt(split)", split.epoch, self._epoch)
            self._epoch = split.epoch
        self._split = split

    def reduce(
        self,
        gradients: torch.Tensor,
        *,
        ends: bool = True,
        model: object = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Put the workers' mean in the place of ``gradients``, in the background.

        Every worker calls it with as many, in the same order.

        Args:
            gradients: flat and contiguous. Leave them alone until the future is done.
            ends: whether these are the last of a step.
            model: whose they are, where steps of several run at once.

        Returns:
            Future with ``gradients``, or with the error that ended it.

        Raises:
            WorkerLostError: a rank was lost before.
            RuntimeError: no split is in force, or this rank has no data.
            TypeError: they are of a type that is not summed.
        """
        self._check_open()
        split = self._split
        if split is None or not self.is_worker or self._pid is None:
            why = "a rank without data" if not self.is_worker else "it was not started"
            why = "no split is in force" if split is None else why
            raise RuntimeError(f"`ShardedReducer.reduce` cannot be called: {why}.")
        devices: list[int | str | torch.device] = [gradients.device] if gradients.is_cuda else []
        reported: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        failed: list[BaseException] = []

        def answer(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if failed:
                raise failed[0]
            return gradients

        def done(error: BaseException | None) -> None:
            failed.extend([] if error is None else [error])
            self._count(running=-1)  # before: who gets it may close at once
            reported.set_result(gradients)  # a device's future looks for the stream of that
            self._count(unreported=-1)

        result = reported.then(answer)
        ready = torch.cuda.current_stream(gradients.device).record_event() if devices else None
        wire = travels_in(gradients.dtype, self._wire)
        job = BucketJob(gradients, gradients.numel(), wire, split, done, self.step, ready)
        self._put(job)
        (self._begun.discard if ends else self._begun.add)(model)
        return result

    def settle(self) -> None:
        """Wait until no bucket is under way.

        Raises:
            WorkerLostError: a rank was lost.
            RuntimeError: the exchange failed otherwise.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._num_unreported)
        self._failure.check()

    def fail(self, error: BaseException) -> BaseException:
        """Make every wait on all ranks end at once; return the error to raise for it.

        That is ``error``, unless something came before. For callers that learn of a loss
        elsewhere, such as from heartbeats, or that use the transport besides.
        """
        return self._failure.on(error)

    def serve(self, on_bucket: Callable[[BucketJob], None] = lambda job: None) -> None:
        """On a rank without data: sum what the workers push until their training ends.

        Returns when the lead worker closes its reducer, and closes this one. ``on_bucket`` gets
        every bucket before it is summed, when all of the steps before is here.

        Raises:
            WorkerLostError: a rank was lost.
            RuntimeError: this rank has data, or the exchange failed otherwise.
        """
        if self.is_worker:
            raise RuntimeError("`ShardedReducer.serve` is for ranks without data; this one works.")
        self.start()

        def done(error: BaseException | None) -> None:
            self._count(running=-1, unreported=-1)

        try:
            for job in orders(self._transport, self._workers[0], done):
                on_bucket(job)
                self._put(job)
        except BaseException as error:
            failure = self._failure.on(error)
            raise failure from (error if failure is not error else None)
        finally:
            self.close()
        self._failure.check()

    def close(self) -> None:
        """End the threads. May be called again.

        In the middle of a step, as after an error, the others' exchange ends with an error that
        names this rank. The transport's group belongs to its maker.
        """
        if self._closed or self._pid not in (None, os.getpid()):
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._pid is None:
            return
        if self.is_worker and (self._num_running or self._begun):
            self._failure.on(RuntimeError("The reducer was closed in the middle of a step."))
        self._pipeline.close()
        self._timeouts.close()
        if self._failure.error is None:
            with suppress(RuntimeError):
                stops = send_order(self._transport, self._notified, self._num_orders, None)
                for _, pending in stops:
                    pending(_STOP_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        self._failure.check()
        if self._closed:
            raise RuntimeError("The reducer was closed. Make a new one, over new groups.")

    def _count(self, *, running: int = 0, unreported: int = 0) -> None:
        with self._changed:
            self._num_running += running
            self._num_unreported += unreported
            if not self._num_unreported:
                self._changed.notify_all()

    def _put(self, job: BucketJob) -> None:
        self._count(running=1, unreported=1)
        try:
            self._pipeline.put(job)
        except BaseException:
            self._count(running=-1, unreported=-1)
            raise

    def _prepare(self, job: BucketJob) -> None:
        """On the issuing thread, before a bucket's first chunk."""
        job.sends += send_order(self._transport, self._notified, self._num_orders, job)
        self._num_orders += 1

    def _give_up(self, peer: int, waited_s: float) -> None:
        self._failure.on(PeerFailed(peer, f"nothing came from it for {waited_s:.1f} s"))
