"""What the rows and the steps of a run show of a script that makes the weights wrong.

Each looks at what is noticed anyway, where it is out of the ordinary, and warns once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

import torch

from ..._warning import OneWarning

if TYPE_CHECKING:
    from ._reductions import ForwardRecord
    from ._tickets import Ticket

_STEPS = 3  # with rows of no batch: a loop that has them has them in most steps
_MOST_LOOKS = 32  # at inputs: on a device each waits for it
_BLIND_STEPS = 5  # a few, as warming-up steps and skipped ones are no mistake
_MOST_FORMS = 64  # of batches, by their numbers of dimensions


@final
class UnknownBatch:
    """Warns once of loops whose steps train on rows that are neither the batch's nor views of it.

    As from a memory or a loader that was not prepared. They get the weight of the batch in use.
    That is right where one loss is a mean over the batch's samples, and wrong where the rows have a
    loss of their own.

    Mostly their number shows it. Rows of which a step has a multiple of the batch's are the batch:
    views of it, or parts. Others may be a copy of what a batch holds beside its rows, such as the
    nodes of its graphs: from the second such step on their values are looked at. A weight of 1 is
    right for any loss.
    """

    def __init__(self) -> None:
        self._num_left, self._looks_left = _STEPS, _MOST_LOOKS
        self._before: Ticket | None = None  # of the newest step with such rows
        self._warn = OneWarning()

    def look(self, use: ForwardRecord, tensors: Sequence[torch.Tensor]) -> None:
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
        if before is None or before is ticket or not _has_others(before):
            return
        self._num_left -= 1
        if not self._num_left:
            self._warn(
                f"A forward in training has {num_rows} rows while a batch of {ticket.size} samples "
                f"is in use: they are neither that batch nor views of it, and get its weight. If "
                f"the rows have a loss of their own, or a part in a mean, as from a memory or a "
                f"loader that was not prepared, that is wrong: make one data set of both, by "
                f"torch's `StackDataset`, or prepare with `prepare(..., weighting='loss')` and "
                f"weight the batch's own loss alone, `balancer.weight(loss)`. If they are some of "
                f"the batch's samples, count them, by `Balancer(unit=...)`, or divide the loss by "
                f"`len(batch)`. If the loss is a mean over the batch's samples, the weight is "
                f"right: say so by `with balancer.step(batch): ...` around the forward."
            )


class DroppedRows:
    """Checks whether a batch has its rows; warns once where ``collate_fn`` left samples out.

    So it does where the tensors of a batch have fewer rows, all as many, and those of another batch
    of this form had one for each sample. A single row may be several samples that are packed.

    Args:
        warns: whether it ever matters.
    """

    def __init__(self, *, warns: bool) -> None:
        self._warns = warns
        self._warn = OneWarning()
        self._forms: set[tuple[int, ...]] = set()

    def has(self, tensors: Sequence[torch.Tensor], size: int, *, units: float | None) -> bool:
        """Return whether one of a batch's tensors has a row for each sample, or it has none.

        Args:
            tensors: of the batch.
            size: samples that were asked for.
            units: of the step, by which the batch is weighted; None where that is samples.
        """
        found = not tensors or any(size in tensor.shape[:2] for tensor in tensors)
        if not (self._warns and units is None and tensors):
            return found
        form = tuple([tensor.ndim for tensor in tensors])
        rows = {tensor.shape[0] for tensor in tensors if tensor.ndim}
        if rows == {size} and len(self._forms) < _MOST_FORMS:
            self._forms.add(form)
        elif not found and len(rows) == 1 and 1 < min(rows) < size and form in self._forms:
            self._warn(
                f"A batch of {size} samples has {min(rows)} rows: `collate_fn` has left samples "
                f"out. Gradients are weighted by the {size} samples of the plan, so this one is no "
                f"mean over the samples that are left. Count those, as in "
                f"`Balancer(unit=lambda batch: len(batch[0]))`, or have the data set return "
                f"another sample in the place of one that cannot be used."
            )
        return found


class UntrackedSteps:
    """Warns once of steps that were trained on and whose gradient was neither weighted nor timed.

    They had forwards and no backward, or parameters have changed meanwhile: a model was not called
    through what ``prepare`` returned.

    Args:
        versions: a number that differs where parameters have changed.
    """

    def __init__(self, versions: Callable[[], int]) -> None:
        self._versions = versions
        # First step, newest used, version, whether that changed before: the optimizer may still
        # step for the newest backward while another thread fetches.
        self._since: tuple[int, int, int, bool] | None = None
        self._warn = OneWarning()

    def handed_out(self, step: int, newest_used: int, num_forwards: Callable[[], int]) -> None:
        """Take note of a step that is not the next one after the newest used.

        Its batch may be fetched long before it is used.

        Args:
            step: the one handed out.
            newest_used: the newest one with a backward through balanced outputs.
            num_forwards: how many steps since then had a forward.
        """
        if self._warn.said:
            return
        version = self._versions()
        if self._since is None or self._since[1] != newest_used:
            self._since = step, newest_used, version, False
            return
        first, _, before, has_stepped = self._since
        if version != before and not has_stepped:
            self._since = first, newest_used, version, True
        elif step - first < _BLIND_STEPS:
            return
        elif version != before or num_forwards() >= _BLIND_STEPS:
            self._warn(
                f"No backward came through a balanced model in the last {_BLIND_STEPS} steps, so "
                f"their gradients were not weighted and nothing was measured. Call the model that "
                f"`prepare` returned by `model(x)`, not `model.module(x)`, whose gradients nothing "
                f"averages, and not `model.forward(x)`. With `weighting='loss'`, use "
                f"`balancer.weight(loss)` as well."
            )


def warn_uneven(uses: Sequence[ForwardRecord], warn: OneWarning) -> None:
    """Warn of a batch that was forwarded in parts of different sizes.

    Args:
        uses: the forwards of which a reduction was made.
        warn: the warning.
    """
    parts: defaultdict[Ticket, set[int]] = defaultdict(set)
    for use in uses:
        if len(use.match.tickets) == 1 and use.match.share is not None:
            parts[use.ticket].add(round(use.match.share * use.ticket.size))
    for ticket, sizes in parts.items():
        if len(sizes) > 1:
            warn(
                f"A batch of {ticket.num_samples} samples went through the model in parts of "
                f"{sorted(sizes)}. That is exact if each part's loss is multiplied by its "
                f"share of the batch, `len(part) / len(batch)`. It is wrong if each is divided "
                f"by the number of parts, because the parts differ in size. `loader.steps()` "
                f"splits batches and weights the parts by itself."
            )


def _has_others(ticket: Ticket) -> bool:
    """Return whether a batch's forwards had rows that are no parts of it.

    A single row may be several samples that are packed.
    """
    return ticket.other_rows != 1 and ticket.other_rows % ticket.size > 0
