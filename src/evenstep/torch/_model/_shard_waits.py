"""What FSDP2 and DeepSpeed wait for other ranks, layer by layer: no part of a rank's own time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any, final

import torch
import torch.distributed as dist

from ..._private_torch import (
    FSDP2_CALLS,
    FSDP2_COLLECTIVES,
    FSDP2_COPY_OUT,
    FSDP2_GROUP,
    FSDP2_POST_BACKWARD,
    FSDP2_REDUCED,
    wait_for_gather,
    wait_for_reduction,
)
from .._step._marks import Recorder
from ._deepspeed import BACKEND, CALLS, COMM


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
