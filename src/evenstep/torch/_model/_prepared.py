"""The models of a run, taken together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..._private_torch import version_of
from ._models import BalancedModel


class PreparedModels(list[BalancedModel]):
    """All models that a balancer has prepared, in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self._through = False
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have the backwards inside accumulate gradients without synchronising them."""
        with ExitStack() as stack:
            for model in self:
                if (context := model.no_sync()) is not None:
                    stack.enter_context(context)
            yield

    def modules(self) -> list[nn.Module]:
        """Return the modules themselves."""
        return [model.module for model in self]

    def version(self) -> int:
        """Return a number that differs where an optimizer has changed a model's parameters."""
        firsts = (next((p for p in m.module.parameters() if p.requires_grad), None) for m in self)
        return sum(version_of(first) for first in firsts if first is not None)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all of them."""
        for model in self:
            yield from model.module.parameters()

    @property
    def can_run_again(self) -> bool:
        """Whether one rank may repeat a forward that broke off, without the others.

        Not where forwards are collectives, as in FSDP2.
        """
        return all(model.shards is None for model in self)

    @property
    def synchronise(self) -> bool:
        """Whether any of them is in a DDP, whose last backward of a step synchronises."""
        return any(model.ddp is not None for model in self)

    def expect_forward(self) -> None:
        """Hear that a forward comes next, which may break off."""
        self.end_forward()
        self._through = False
        for model in self:
            model.broadcasts.clear()
            if model.ddp is not None and not model.compiles:
                self._hooks.append(model.module.register_forward_hook(self._note))

    def end_forward(self) -> None:
        """Hear that it has not, and that its backward is over too."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note(self, *_: Any) -> None:
        self._through = True

    @property
    def expects_reduction(self) -> bool:
        """Whether a DDP's forward is through, which may have set the reducer on its backward.

        DDP offers no way back from there that would not rebuild its buckets, on this rank alone.
        """
        if any(model.ddp is not None and model.compiles for model in self):
            return True  # a hook would be compiled along, so that is unknown
        return self._through

    def forget_forward(self) -> None:
        """Undo what a forward that broke off has left in DDP.

        If it came as far as the broadcast of buffers, the next one would broadcast them once more,
        on this rank alone. The attribute is DDP's own; a test holds it for the pinned version.
        """
        self.end_forward()
        for model in self:
            if model.ddp is not None and model.broadcasts:
                model.ddp.require_forward_param_sync = False
