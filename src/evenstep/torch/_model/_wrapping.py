"""What a step owes to how the models are wrapped: plain, in DDP, sharded by FSDP2.

- Plain and DDP synchronise in the last backward, at its end. A rank's own time goes from the
  hand-out to the end of its own backward.
- DeepSpeed's engine reduces in every backward, and with ZeRO-3 gathers in every layer. Own time is
  found as for FSDP2.
- FSDP2 synchronises in every layer, forward and backward. In steps in which ranks differ in their
  forwards it gathers before the first of them and reduces all through the last backward. Own time
  is what lies outside of its waits (``ShardWaits``), up to the end of own backward.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from time import monotonic
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..._exchange._exchange import Exchange
from ..._planner import Bounds
from ..._private_torch import (
    FSDP2_CALLS,
    FSDP2_COLLECTIVES,
    FSDP2_COPY_OUT,
    FSDP2_GROUP,
    FSDP2_POST_BACKWARD,
    FSDP2_REDUCED,
    CollectiveCount,
    check_reduced,
    meet,
    wait_for_gather,
    wait_for_reduction,
)
from ..._run._machine_reader import ClueReader
from ..._run._step_state import StepObserver
from ..._torch_clock import clock_of
from ..._warning import warn
from ...exceptions import invalid
from ...policies import AbstractPolicy, Equal, Fixed
from .._step._marks import Recorder, StepMeter
from ._sharded import BACKEND, CALLS, COMM, Shards, is_engine

if TYPE_CHECKING:
    from ._models import BalancedModel


@final
class ShardWaits:
    """Notes each wait of FSDP2, or of DeepSpeed, between two marks, until it is removed.

    Ranks meet in every layer, forward and backward. A rank's own time is what lies outside of all
    its waits; copying into and out of what is sent is its own, and time on the wire is not.

    On a CPU the collective itself is what waits, or ``Work.wait`` where it was begun before. On a
    device nothing waits but the stream that computes: the wait is asked for a moment before FSDP2
    asks for it, between two marks on that stream, and FSDP2's own is over at once then.

    The code of FSDP2 and DeepSpeed is changed in this process, and no other: collectives of a
    script's own are not noted. That code is as it was once all are removed. Those of DeepSpeed are
    noted where it calls them, on a device as well. That is right where it waits for them at once.

    Args:
        recorder: notes the waits.
        device: where the layers compute.
        has_engine: whether DeepSpeed reduces, and not FSDP2.
    """

    def __init__(self, recorder: Recorder, device: torch.device, *, has_engine: bool) -> None:
        self._recorder, self._device = recorder, device
        self._is_open, self._has_engine = True, has_engine
        if has_engine:
            backend = partial(_Noted, names=CALLS, noted=self._noted)
            self._restores = [_put(sys.modules[COMM], BACKEND, backend)]
            return
        groups, collectives = sys.modules[FSDP2_GROUP], sys.modules[FSDP2_COLLECTIVES]
        self._restores = [_put(groups, FSDP2_COPY_OUT, self._copying_out)]
        if device.type == "cpu":
            self._restores.append(
                _put(collectives, "dist", partial(_Noted, names=FSDP2_CALLS, noted=self._noted))
            )
            return
        kind = groups.FSDPParamGroup
        self._restores.append(_put(kind, FSDP2_REDUCED, self._noted))
        self._restores.append(_put(kind, FSDP2_POST_BACKWARD, self._after_backward))

    def remove(self) -> None:
        """Note nothing any more."""
        self._is_open = False
        while self._restores:
            self._restores.pop()()

    def _noted(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits, and has it noted for how long."""
        mark, note = self._recorder.mark, self._recorder.note
        exclude = self._recorder.meter.exclude

        @wraps(before)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if not self._is_open:
                return before(*args, **kwargs)
            begin = mark()
            try:
                result = before(*args, **kwargs)
            finally:
                note((exclude, begin, mark()))
            if self._has_engine and isinstance(result, dist.Work):  # FSDP2 asks for its class
                return _Begun(result, self._noted)
            return result

        return noted

    def _copying_out(self, before: Callable[..., Any]) -> Callable[..., Any]:
        wait, on_cpu = self._noted(wait_for_gather), self._device.type == "cpu"

        @wraps(before)
        def copied_out(result: Any, *args: Any, **kwargs: Any) -> Any:
            if not on_cpu or result.all_gather_work is not None:
                wait(result, self._device)
            return before(result, *args, **kwargs)

        return copied_out

    def _after_backward(self, before: Callable[..., Any]) -> Callable[..., Any]:
        wait = self._noted(wait_for_reduction)

        @wraps(before)
        def post_backward(group: Any, *args: Any) -> Any:
            if group.reduce_grads:
                wait(group)
            return before(group, *args)

        return post_backward


class _Begun:
    """A collective that was begun and is waited for later, which is noted; all else is its own."""

    def __init__(self, work: Any, noted: Callable[[Any], Any]) -> None:
        self._work = work
        self.wait = noted(work.wait)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Noted(ModuleType):
    """A module, or what stands for one, with collectives that are noted; all else is its own."""

    def __init__(self, before: Any, *, names: Sequence[str], noted: Callable[[Any], Any]) -> None:
        super().__init__(getattr(before, "__name__", "backend"))
        self._before = before
        for name in names:
            if (function := getattr(before, name, None)) is not None:
                setattr(self, name, noted(function))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._before, name)
        if callable(found):  # every layer asks; what is no function may change
            setattr(self, name, found)
        return found


def _put(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Put ``make(before)`` in the place of what an owner has there; return what undoes it.

    What another run has put around it since stays, until that run is over, too.
    """
    ours = make(getattr(owner, name))
    ours.was, ours.is_over = getattr(owner, name), False
    setattr(owner, name, ours)

    def restore() -> None:
        ours.is_over = True
        while getattr(now := getattr(owner, name), "is_over", False):
            setattr(owner, name, now.was)

    return restore


class Wrapping:
    """How the models of a run are wrapped, and which kind of loop they run in.

    Args:
        models: of the run. A single rank waits for no other.
        bounds: of the balancer.
        world_size: number of workers.
        cuts: whether the loop takes micro-batches.

    Raises:
        ValueError: models, or what is to vary, do not go with the kind of loop.
    """

    def __init__(
        self, models: Sequence[BalancedModel], bounds: Bounds, *, world_size: int, cuts: bool
    ) -> None:
        if not cuts and bounds.vary == "count":
            raise invalid(
                "Balancer(bounds=Bounds(vary='count'))",
                "be used in a loop over `loader.steps()`",
                "`for batch in loader`",
                "Loop over the steps and their micro-batches: `for step in loader.steps(): for "
                "batch in step: ...`.",
            )
        self._cuts, self._has_others = cuts, world_size > 1
        waiting = models if self._has_others else ()
        self._has_engine = any(is_engine(model.module) for model in waiting)
        if cuts:
            if self._has_engine:
                raise invalid(
                    "A DeepSpeed engine",
                    "be trained in a loop over whole batches, since every backward reduces",
                    "`loader.steps()`",  # in which ranks would differ in their collectives
                    "Use `for batch in loader`; the engine accumulates by "
                    "`gradient_accumulation_steps`.",
                )
            for model in waiting:
                _refuse_sync_batch_norm(model.module)
                _refuse_static_graph(model)
        self._shards = tuple(model.shards for model in waiting if model.shards is not None)
        self._ddps = tuple(model.ddp for model in waiting if model.ddp is not None)

    def recorder(
        self, device: torch.device, clues: ClueReader | None, policy: AbstractPolicy[Any]
    ) -> Recorder:
        """Return what measures a rank's own time, and say if there is no such thing.

        Args:
            device: where this rank computes.
            clues: makes more of what is noted; None where no other rank would wait.
            policy: for which no time is missing if it does without.
        """
        is_blind = any(part.has_own_collectives for part in self._shards)
        if is_blind and not isinstance(policy, Equal | Fixed):
            warn(
                "FSDP2 waits for other ranks in collectives of your own, given to "
                "`set_custom_all_gather` or `set_custom_reduce_scatter`, which cannot be told from "
                "computing: nothing is measured, and the batch sizes stay as they are. Leave them "
                "out, or choose equal sizes: `Balancer(policy='equal')`."
            )
        meter = StepMeter(clock_of(device), mixes=is_blind)
        recorder = Recorder(meter, CollectiveCount() if self._has_others else None, clues)
        if self._has_engine:
            recorder.handles.append(ShardWaits(recorder, device, has_engine=True))
        if self._shards:
            recorder.handles.append(ShardWaits(recorder, device, has_engine=False))
        return recorder

    def observers(self, exchange: Exchange, recorder: Recorder) -> list[StepObserver]:
        """Return what goes along with the steps of models that are wrapped so."""
        found: list[StepObserver] = []
        if self._ddps:
            found.append(_Reduced(self._ddps))
        together = self._ddps if self._cuts and len(self._ddps) > 1 else ()
        sharded = self._shards if self._cuts else ()
        meeting = _Meeting(together, sharded, exchange, recorder)
        if together or sharded:
            found.append(meeting)
        if self._shards or self._has_engine:
            found.append(_ShardedForwards(exchange, meeting))
        return found


@final
class _Reduced(StepObserver):
    """Raises DDP's own error where a backward is over, and not all it reduces was ready."""

    def __init__(self, ddps: Sequence[DistributedDataParallel]) -> None:
        self._ddps = ddps

    def check_over(self) -> None:
        for ddp in self._ddps:
            check_reduced(ddp)


@final
class _Meeting(StepObserver):
    """Has all ranks meet before the first forward of a step; that is no time of their own.

    FSDP2's layers are made whole there, if ranks differ in their forwards. So are several DDPs made
    ready, in steps of different numbers of forwards. Two of a DDP's forwards are collective: the
    first after its first backward, which settles its buckets, and the first of every step where it
    broadcasts buffers. With one model all ranks meet there. With two, a rank of one micro-batch
    goes from the first model's forward to its all-reduce, while one of two goes to the second
    model's forward: both wait for ever. So both collectives run here, for all models in the order
    of ``prepare``.

    Attributes:
        equal_forwards: whether ranks make as many forwards in the step under way, and know it.
    """

    def __init__(
        self,
        ddps: Sequence[DistributedDataParallel],
        shards: Sequence[Shards],
        exchange: Exchange,
        recorder: Recorder,
    ) -> None:
        self._ddps, self._shards = ddps, shards
        self._exchange, self._recorder = exchange, recorder
        self.equal_forwards = False

    def first_forward(self, *, equal_forwards: bool) -> None:
        self.equal_forwards = equal_forwards
        self._exchange.lost_ranks.enter_collective()
        for ddp in self._ddps:
            begin = self._recorder.mark()
            meet(ddp)
            self._recorder.exclude(begin, self._recorder.mark())
        for part in self._shards:
            if equal_forwards:
                part.give_up()
            else:
                part.gather()
        self._exchange.lost_ranks.leave_collective()


@final
class _ShardedForwards(StepObserver):
    """Reports the collectives of a step, which begin in its last forward or are in each."""

    def __init__(self, exchange: Exchange, meeting: _Meeting) -> None:
        self._exchange, self._meeting = exchange, meeting

    def begin_forward(self, num_samples: int, *, is_last: bool) -> None:
        if is_last or self._meeting.equal_forwards:
            lost = self._exchange.lost_ranks  # as `enter_collective`, without a call
            lost.thread_id, lost.collective_s = threading.get_ident(), monotonic()


def _refuse_static_graph(model: BalancedModel) -> None:
    """Raise where DDP learns the graph from its first backward, whether that synchronises or not.

    In a step of several micro-batches it does not, and torch fails in a later one.
    """
    if model.ddp is not None and model.ddp.static_graph:
        raise invalid(
            "A model in a loop over `loader.steps()`",
            "be in a DDP without a static graph",
            "`DDP(model, static_graph=True)`",
            "Leave `static_graph` out, or use `for batch in loader`.",
        )


def _refuse_sync_batch_norm(module: nn.Module) -> None:
    """Raise for a collective in the forward: ranks with different counts would wait for ever."""
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise invalid(
            "A model in a loop over `loader.steps()`",
            "have no SyncBatchNorm, in which ranks would wait for those with fewer micro-batches",
            f"{type(module).__name__} with it",
            "Use `for batch in loader`, where every rank has one forward, or GroupNorm.",
        )
