"""Forwards beside a batch's own whose rows are of no batch, as from a loader that was not prepared.

They get the weight of the batch. That is right where one loss is a mean over the batch's samples,
and wrong where the rows have a loss of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import final

import torch

from ...exceptions import EvenstepWarning
from ._batch_memory import Peek
from ._tickets import Ticket

_STEPS = 3  # with such a forward: a loop that has them has them in all steps
_MOST_LOOKS = 32  # at inputs: on a device each waits for it


@final
class StrangeRows:
    """Warns once of loops in which a batch has a forward, and rows of no batch have another.

    Such rows are data, to which no gradient leads. They change from step to step, their number is
    no multiple of the batch's, and they are no copy of it. A weight of 1 is right for any loss.
    """

    def __init__(self) -> None:
        self._num_left, self._looks_left = _STEPS, _MOST_LOOKS
        self._before: tuple[Ticket, Peek] | None = None  # the newest such forward

    def look(self, ticket: Ticket, tensors: Sequence[torch.Tensor], num_rows: int) -> None:
        """Look at a forward while a batch is in use that has another number of rows.

        Args:
            ticket: of the batch.
            tensors: the inputs.
            num_rows: that they have.
        """
        if not (self._num_left and self._looks_left and ticket.has_rows):
            return
        if ticket.weight == 1.0 or num_rows % ticket.size == 0:
            return
        self._looks_left -= 1
        if any(one.grad_fn is not None or ticket.shows_in(one) for one in tensors):
            return
        before = self._before
        if before is not None and before[0] is ticket:  # of one step, one is enough
            return
        if before is not None and any(before[1].shows(one) for one in tensors):
            self._num_left = 0  # a table that every step looks at
            return
        peeks = [peek for one in tensors if (peek := Peek.of(one)) is not None]
        self._before = (ticket, peeks[0]) if peeks else None
        if before is not None and before[0].had_whole:
            self._num_left -= 1
            if not self._num_left:
                self._warn(num_rows, ticket.size)

    def _warn(self, num_rows: int, size: int) -> None:
        warnings.warn(
            f"A forward in training has {num_rows} rows that are from no batch of a balanced "
            f"loader, beside a forward of a batch of {size} samples, and gets that batch's weight. "
            f"If these rows have a loss of their own, as from a loader that was not prepared, that "
            f"is wrong: make one data set of both, by torch's `StackDataset`, or prepare with "
            f"`prepare(..., weighting='loss')` and weight the batch's own loss alone, "
            f"`balancer.weight(loss)`. If the loss is a mean over the batch's samples, the weight "
            f"is right: say so by `with balancer.step(batch): ...` around the forward.",
            EvenstepWarning,
            stacklevel=2,
        )
