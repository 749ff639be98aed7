"""What ``self.log`` and ``self.all_gather`` reduce over ranks whose counts differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist

from ..exceptions import invalid
from ..torch import Balancer
from ._library import hook_of

_IN_A_BATCH = (  # in which something may be logged on a step
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
    "on_validation_batch_start",
    "validation_step",
)
_AT_ITS_END = ("on_train_batch_end", "on_validation_batch_end")  # before `settle` or after it
_NOT_SAID: Any = object()  # what is logged always says its group; others need their result now


@final
class LoggedMeans:
    """Stands in the place of a strategy's ``reduce`` and ``all_gather`` while a fit is balanced.

    Lightning's mean over ranks is right for equal counts only. A value logged on a step with
    ``sync_dist=True``, or in a hook around it, is the mean over the samples of all ranks here, and
    is reduced after the step's backward: a collective before it would make all ranks wait, and
    look equally fast. For a value of an epoch, Lightning divides the mean of sums by the mean of
    counts, which it rounds down to an integer; here that mean is exact.

    Lightning keeps what it is given to reduce with, and refuses another one in a later fit of the
    same trainer: so there is one of these for all fits.
    """

    def __init__(self) -> None:
        self._strategy: Any = None
        self._module: Any = None
        self._balancer: Balancer | None = None
        self._count: Callable[[], float | None] | None = None
        self._later: list[tuple[torch.Tensor, Any]] = []

    def begin(
        self,
        strategy: Any,
        module: Any,
        balancer: Balancer,
        count: Callable[[], float | None],
    ) -> None:
        """Stand in for ``strategy``, whose class continues to reduce.

        Args:
            strategy: of the trainer.
            module: logs.
            balancer: of the fit.
            count: returns the samples of this rank that a mean of the batch in hand is over; None
                is those of the training step.
        """
        self._strategy, self._module, self._balancer = strategy, module, balancer
        self._count = count
        strategy.reduce, strategy.all_gather = self.reduce, self.all_gather

    def end(self) -> None:
        """Leave the strategy as it was."""
        for name in ("reduce", "all_gather"):
            vars(self._strategy).pop(name, None)
        self._balancer, self._module, self._count, self._later = None, None, None, []

    def reduce(self, tensor: Any, group: Any = _NOT_SAID, reduce_op: Any = "mean") -> Any:
        """Return ``tensor`` reduced over ranks; of what a step logs, once ``settle`` is called."""
        if group is _NOT_SAID:  # as of `reduce_boolean_decision`, by which a step may be left out
            return self._plainly(tensor, None, reduce_op)
        if isinstance(tensor, torch.Tensor) and self._balancer is not None:
            hook = hook_of(self._module)
            if group is None and not tensor.requires_grad:
                if hook in _IN_A_BATCH:
                    self._later.append((tensor, reduce_op))
                    return tensor
                if hook in _AT_ITS_END:
                    return self._reduced(tensor, reduce_op)
            if _is_mean(reduce_op) and not tensor.is_floating_point():
                tensor = tensor.double()
        return self._plainly(tensor, group, reduce_op)

    def settle(self) -> None:
        """Reduce what the batch has logged, in place. Collective."""
        later, self._later = self._later, []
        for tensor, reduce_op in later:
            self._reduced(tensor, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, which have to have one shape.

        Raises:
            ValueError: they have not, on every rank; torch would wait, or return garbage.
        """
        if isinstance(tensor, torch.Tensor) and tensor.ndim and dist.is_initialized():
            shapes: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(shapes, tuple(tensor.shape), group=group)
            if len(set(shapes)) > 1:
                raise invalid(
                    "LightningModule.all_gather(data)",
                    "have one shape on all ranks",
                    ", ".join(map(str, shapes)),
                    "Ranks have different numbers of samples: gather sums and counts, log with "
                    "`sync_dist=True`, or use torchmetrics.",
                )
        kind = type(self._strategy)
        return kind.all_gather(self._strategy, tensor, group=group, sync_grads=sync_grads)

    def _reduced(self, tensor: torch.Tensor, reduce_op: Any) -> torch.Tensor:
        if _is_mean(reduce_op) and self._balancer is not None and self._count is not None:
            return tensor.fill_(self._balancer.mean(tensor, self._count()))
        return tensor.copy_(self._plainly(tensor.clone(), None, reduce_op))

    def _plainly(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        kind = type(self._strategy)
        return kind.reduce(self._strategy, tensor, group=group, reduce_op=reduce_op)


def _is_mean(reduce_op: Any) -> bool:
    return isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
