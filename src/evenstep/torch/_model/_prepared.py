"""The models of a run, taken together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from ._models import BalancedModel


class PreparedModels(list[BalancedModel]):
    """All models that a balancer has prepared, in the order in which they came."""

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
        for model in self:
            model.broadcasts.clear()

    def forget_forward(self) -> None:
        """Undo what a forward that broke off has prepared for synchronising.

        DDP's reducer would take the next backward for the one to reduce. And its next forward would
        broadcast buffers once more, on this rank alone, if the one that broke off had come so far.
        Both attributes are DDP's own; a test holds them for the pinned version.
        """
        for model in self:
            if model.ddp is not None:
                model.ddp.reducer._reset_state()
                if model.broadcasts:
                    model.ddp.require_forward_param_sync = False
