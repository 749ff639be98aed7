"""Forwards whose rows are of no batch, as from a memory or a loader that was not prepared.

They get the weight of the batch in use. That is right where one loss is a mean over the batch's
samples, and wrong where the rows have a loss of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from ..._warning import warn
from ._tickets import Ticket
from ._uses import ForwardUse

_STEPS = 3  # with such rows: a loop that has them has them in most steps
_MOST_LOOKS = 32  # at inputs: on a device each waits for it


@final
class StrangeRows:
    """Warns once of loops whose steps train on rows that are neither the batch's nor views of it.

    Mostly their number tells. Rows of which a step has a multiple of the batch's are the batch:
    views of it, or parts. Others may be a copy of what a batch holds beside its rows, such as the
    nodes of its graphs: from the second such step on their values are looked at. A weight of 1 is
    right for any loss.
    """

    def __init__(self) -> None:
        self._num_left, self._looks_left = _STEPS, _MOST_LOOKS
        self._before: Ticket | None = None  # of the newest step with such rows

    def look(self, use: ForwardUse, tensors: Sequence[torch.Tensor]) -> None:
        """Look at a forward with another number of rows than the batch in use.

        Args:
            use: the forward.
            tensors: its inputs.
        """
        ticket, num_rows = use.ticket, use.match.other_rows
        if not (self._num_left and self._looks_left and ticket.has_rows):
            return
        if ticket.weight == 1.0 or num_rows % ticket.size == 0:
            return
        if any(one.grad_fn is not None for one in tensors):
            return  # computed from rows that had a forward of their own
        if self._num_left < _STEPS:
            self._looks_left -= 1
            if ticket.may_hold(tensors):
                return
        use.other_rows = num_rows
        before, self._before = self._before, ticket
        if before is not None and before is not ticket and _has_others(before):
            self._num_left -= 1
            if not self._num_left:
                self._warn(num_rows, ticket.size)

    def _warn(self, num_rows: int, size: int) -> None:
        warn(
            f"A forward in training has {num_rows} rows while a batch of {size} samples is in use: "
            f"they are neither that batch nor views of it, and get its weight. If the rows have a "
            f"loss of their own, or a part in a mean, as from a memory or a loader that was not "
            f"prepared, that is wrong: make one data set of both, by torch's `StackDataset`, or "
            f"prepare with `prepare(..., weighting='loss')` and weight the batch's own loss alone, "
            f"`balancer.weight(loss)`. If they are some of the batch's samples, count them, by "
            f"`Balancer(unit=...)`, or divide the loss by `len(batch)`. If the loss is a mean over "
            f"the batch's samples, the weight is right: say so by `with balancer.step(batch): ...` "
            f"around the forward."
        )


def _has_others(ticket: Ticket) -> bool:
    """Tell whether a batch's forwards had rows that are no parts of it.

    A single row may be several samples that are packed.
    """
    return ticket.other_rows != 1 and ticket.other_rows % ticket.size > 0
