"""A watch on what is compiled in training: how long, that it is no time of a step, and its limit.

Sizes that change cost graphs: one for any size where the batch dimension is marked as dynamic, one
for each where ``torch.compile(dynamic=False)`` asks for it. At ``torch._dynamo.config``'s
``recompile_limit`` torch gives up and runs the model uncompiled, with no more than a line in a log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from ..._exchange._observer import StepObserver
from ..._nested_tensors import tensors_in
from ..._private_torch import IN_PLACE, compile_callbacks, compiling, mark_dynamic
from ..._torch_clock import CompileClock
from ..._warning import warn

# Compilations of one piece of code that are left when the sizes are held: for the short last step
# of an epoch, and for a plan that was on its way already.
_RESERVE = 2


class Placed(Protocol):
    """Hooks around a module's forward.

    Attributes:
        module: the module.
        call: what stands in the place of its compiled call; None where it has none.
    """

    module: nn.Module
    call: Any


class CompileWatch(StepObserver):
    """Notices compilations in this process while it trains; costs nothing where there are none.

    torch calls back at the start of each compilation: forward, backward, autotuning of kernels,
    recording of CUDA graphs. Whatever is compiled in a step, that step's time is not the model's.
    What is compiled in the forward of a balanced model is counted by its code: compiled for a
    second size or more, and close to the limit, the sizes are to be held.

    Attributes:
        clock: how long it took.
        marks: whether a balanced model as a whole is compiled, so that its inputs are marked.
        has_parts: whether one has compiled parts, whose own inputs are marked.
        varies: whether sizes change at all, so that there is something to mark.
        on_cuda: whether models compute there, where cudnn may tune for every new size.
        holds: whether another size might leave a model uncompiled.
        num_samples: of the forward under way; 0 outside of one, or in one that is none of training.
    """

    def __init__(self) -> None:
        self.clock = CompileClock()
        self.marks = False
        self.has_parts = False
        self.holds = False
        self._places: list[tuple[Placed, dict[str, Any], Callable[[], None]]] = []
        self.varies = True
        self.on_cuda = False
        self._handler: Any = None
        self._stalled = False
        self.num_samples = 0
        self._sizes: defaultdict[int, set[int]] = defaultdict(set)  # by piece of code
        self._tuned: set[int] = set()  # sizes that convolutions were tuned for
        self._advice = ""

    @property
    def stalled(self) -> bool:
        """Whether something was compiled, or tuned, in the step under way."""
        handler = self._handler
        return self._stalled or (
            handler is not None and self._noticed not in handler.start_callbacks
        )

    def before_steps(self, hooks: Iterable[Placed], place: Callable[[], None]) -> None:
        """Have ``place`` called before a step if a module of ``hooks`` was compiled meanwhile."""
        self._places += [(one, one.module.__dict__, place) for one in hooks]

    def begin_step(self, step: int) -> None:
        """Begin to look at a step, and say once what was found in those before."""
        self._stalled = False
        if self._handler is None:  # nothing can be compiled before torch's compiler is imported
            self._handler = compile_callbacks()
        handler = self._handler
        if handler is not None and self._noticed not in handler.start_callbacks:
            handler.register_start_callback(self._noticed)  # again, where a reset forgot it
            self.clock.listen()
        for hooks, namespace, place in self._places:
            if namespace.get(IN_PLACE) is not hooks.call:
                place()
        if self._advice:
            text, self._advice = self._advice, ""
            warn(text)

    def tunes(self, num_samples: int, *, is_last: bool) -> None:
        """Note that convolutions are tuned for a new number of samples, on CUDA."""
        if torch.backends.cudnn.benchmark and num_samples not in self._tuned:
            self._stalled = True
            self._tuned.add(num_samples)

    def mark(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        """Mark the batch dimension of tensors as dynamic, so that no size gets its own graph.

        Weakly: where a model needs a fixed size, it is compiled with that and nothing is refused.
        At the model and not in the loader, as marks do not survive ``batch.to(device)``.
        """
        size = self.num_samples
        if size < 2 or not self.varies:  # torch takes 0 and 1 for constants
            return
        for tensor in tensors_in((inputs, keywords)):
            if tensor.dim() and tensor.shape[0] == size:
                mark_dynamic(tensor)

    def close(self) -> None:
        """Stop listening."""
        self._places.clear()
        self.clock.close()
        handler = self._handler
        if handler is not None and self._noticed in handler.start_callbacks:
            handler.remove_start_callback(self._noticed)

    def _noticed(self, *_: Any) -> None:
        """Be called back by torch, in the middle of a forward or a backward."""
        self._stalled = True
        if self.num_samples and torch.is_grad_enabled():
            self.marks |= not self.has_parts  # a model that was compiled after it was prepared
            self._count()

    def _count(self) -> None:
        if (now := compiling()) is None:
            return
        sizes = self._sizes[now.code]
        sizes.add(self.num_samples)
        if len(sizes) > 1 and now.limit - (now.num_before + 1) <= _RESERVE and not self.holds:
            self.holds = True
            self._advice = (
                f"A balanced model was compiled {now.num_before + 1} times, for the batch sizes "
                f"{sorted(sizes)} among others. At {now.limit} times torch would run it "
                f"uncompiled with only a line in a log, so all sizes stay as they are from here "
                f"on. Have the model use its batch size as a tensor shape only, raise "
                f"`torch._dynamo.config.recompile_limit`, or keep one shape with "
                f"`Bounds(vary='count', granularity=...)` in a loop over `loader.steps()`."
            )
