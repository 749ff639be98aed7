"""Which handed-out batch a forward belongs to: the weight of a gradient follows from the batch.

Each batch that a loop gets opens a ticket. A forward is matched to tickets by evidence alone:

1. by memory: an input shares it with a handed-out tensor (itself, a view, a split);
2. all tickets in use weigh alike, so that it does not matter which one it is;
3. by size: the rows of an input are as many as the samples of one ticket only, or as some views
   of each. Not where a batch in use has no tensor with a row for each sample, as a packed one: its
   single row is no batch of one sample;
4. by value: an input begins with a copy of a handed-out tensor, as on another device;
5. by what other ranks know (``StepTracker``).

A ticket is in use until a forward that is its own beyond doubt has had a backward and the loop has
come back for another batch.

The order in which batches are handed out and used is no evidence: a loop may fetch ahead, keep
batches and use them again. But where batches are nothing but indices, from which a loop makes its
inputs, neither memory nor values decide. A forward belongs to the oldest unused one then, if it
has as many rows; a loop that leaves one out has to name the others, or ranks differ.

Where nothing decides, the weight is an error that names the remedy, raised in the backward, as a
forward without one (an evaluation) needs no weight.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, call
from typing import Any, NamedTuple, NoReturn

import torch

from ..._nested_tensors import tensors_in
from ..._run._step_state import StepState
from ..._types import IntArray
from ...exceptions import invalid
from ._batch_checks import DroppedRows
from ._batch_memory import BatchMemory, Found, Layouts, Peek, with_memory


def rows_of_several(sizes: Sequence[int]) -> Callable[[], NoReturn]:
    """Return the weight of a forward that has rows of several batches, of these sizes."""
    size = sizes[-1] if sizes else 0

    def unknown() -> NoReturn:
        raise RuntimeError(
            f"A forward has rows of several batches, or rows beside those of a batch of {size} "
            f"samples: no single weight is right for them. Give each batch its own forward. If all "
            f"rows belong to one batch, or its own loss alone is weighted, under "
            f"`prepare(..., weighting='loss')`, name it around the forward: "
            f"`with balancer.step(batch): ...`."
        )

    return unknown


def unknown_batch(sizes: Sequence[int]) -> Callable[[], NoReturn]:
    """Return the weight of a forward that may belong to any of several batches, of these sizes."""

    def unknown() -> NoReturn:
        raise RuntimeError(
            f"No rank can tell which batch this backward belongs to: batches of {list(sizes)} "
            f"samples are in use, and neither the tensors nor the sizes of its inputs match one of "
            f"them. Name the batch around the forward: `with balancer.step(batch): loss = ...`, "
            f"with `batch` as the loader handed it out."
        )

    return unknown


def not_averaged() -> NoReturn:
    """Raise for the weight of a micro-batch whose gradient DDP would average before the last."""
    raise RuntimeError(
        "A forward of this model in the last micro-batch of a step had no backward. DDP waits for "
        "one, and would average the gradient of this micro-batch, on this rank alone. Run "
        "forwards whose gradient is not used without gradients: "
        "`with torch.no_grad(): fake = generator(noise)`."
    )


_SHAPE = attrgetter("shape")

Weight = float | Callable[[], float]
"""What a gradient is multiplied by: known in the forward, or asked for in the backward."""

# A batch that was fetched and has not been used after so many others: no prefetcher looks so far
# ahead. It can still be recognised by identity.
_MOST_WAITING = 64
_MOST_PEEKS = 8  # tensors of a batch that are looked at


@dataclass(eq=False, slots=True)
class Ticket:
    """A batch that was handed out: for one forward, or for several.

    Attributes:
        step: the step it belongs to.
        num_samples: samples in it that count; 0 for a stand-in of weight 0.
        weight: what its gradient is multiplied by.
        key: equal for tickets with equal weights.
        is_last: whether it is the step's last one.
        units: that a mean divides by; None where they are its samples.
        is_over: whether the loop that handed it out has ended.
        num_backwards: how many its forwards have had, those included that may be another's.
        is_trained: whether one of its own forwards, beyond doubt, has had a backward.
        peeks: some values of its tensors, if they were looked at when they were handed out.
        tensors: weak references to its tensors.
        is_new: whether no other batch had their memory.
        has_rows: whether one of its tensors has a row for each sample, or it has no tensors.
        is_indices: whether it is one row of integers, as a loader of indices hands out: inputs are
            made from what they stand for.
        keys: what its samples draw random numbers by, stand-ins included; None where those are
            the rank's own.
        num_draws: dropouts, and the like, in its forwards so far.
        other_rows: how many rows its forwards with a backward had that may be of no batch.
    """

    step: StepState
    num_samples: int
    weight: Weight
    key: Any
    is_last: bool
    units: float | None = None
    is_over: bool = False
    num_backwards: int = 0
    is_trained: bool = False
    peeks: tuple[Peek, ...] = ()
    tensors: tuple[weakref.ref[torch.Tensor], ...] = ()
    is_new: bool = False
    has_rows: bool = True
    is_indices: bool = False
    keys: IntArray | None = None
    num_draws: int = 0
    other_rows: int = 0

    def shows_in(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` begins with a copy of a tensor of the batch."""
        return any(peek.shows(tensor) for peek in self._looks())

    def may_hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` may be copies of what the batch holds beside rows, or packed.

        As nodes of graphs, of which each batch has another number. They may also where nothing is
        left of the batch to be compared with.
        """
        looks = self._looks()
        if not looks or max(one.ndim for one in tensors) == 1 < max(len(p.row) for p in looks) + 1:
            return True
        return any(
            peek.num_rows == len(one) and peek.shows(one)
            for peek in looks
            for one in tensors
            if one.ndim
        )

    def ends_in(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` begins with a copy of one of the batch's, and continues.

        Several views of one batch have as many rows each; a part of it has fewer.
        """
        alike = [peek for peek in self._looks() if peek.row == tensor.shape[1:]]
        if not tensor.ndim or any(peek.num_rows == len(tensor) for peek in alike):
            return False
        shorter = [peek for peek in alike if peek.num_rows < len(tensor)]
        return any(len(tensor) % peek.num_rows and peek.shows(tensor) for peek in shorter)

    def _looks(self) -> tuple[Peek, ...]:
        return self.peeks or _peeks(one for ref in self.tensors if (one := ref()) is not None)

    @property
    def size(self) -> int:
        """Samples in the batch, a stand-in included."""
        return max(self.num_samples, 1)

    def fits(self, rows: Iterable[int], views: Iterable[int]) -> bool:
        """Return whether so many rows may be the batch's, or so many some views of each.

        Args:
            rows: of inputs, as far as they are known.
            views: those of which there may be several for each sample.
        """
        size = self.size
        return size in rows or any(number in (2 * size, 3 * size, 4 * size) for number in views)


class Match(NamedTuple):
    """What is known of a forward's batch.

    Attributes:
        tickets: those it may belong to, the oldest first; one if it is certain.
        weight: of its gradient.
        share: which part of the batch it has, where the inputs show it; None where they do not.
        is_open: whether nothing here shows which of the tickets it is: the weight raises.
        is_certain: whether there is no doubt which ticket it is.
        other_rows: how many rows the inputs have, where they are not those of a batch in use.
    """

    tickets: tuple[Ticket, ...]
    weight: Weight
    share: float | None = None
    is_open: bool = False
    is_certain: bool = False
    other_rows: int = 0


class Tickets:
    """The tickets of a run on this rank. Safe to use from several threads.

    Args:
        identifies: whether batches are recognised by their memory; not needed by a single rank.
        counts_rows: whether weights go by samples, unless steps have other units.
    """

    def __init__(self, *, identifies: bool, counts_rows: bool = False) -> None:
        self._identifies = identifies
        self._rows = DroppedRows(warns=counts_rows)
        self._lock = threading.Lock()
        self._live: list[Ticket] = []
        self._memory: BatchMemory[Ticket] = BatchMemory()
        self._layouts = Layouts()
        self._mixes = False  # whether a forward ever had other rows than a batch has

    def open(self, ticket: Ticket, batch: Any, *, peeks: bool = True) -> None:
        """Note that ``batch`` is handed out with ``ticket``, the loop having come back for it.

        Args:
            ticket: what is known of it.
            batch: as the loop gets it.
            peeks: whether copies of it may have to be recognised.
        """
        with self._lock:
            live = self._live
            while live and live[0].is_trained:
                del live[0]
            if len(live) > 1:
                live = self._live = [other for other in live if not other.is_trained]
            live.append(ticket)
            if len(live) > _MOST_WAITING:
                del live[0]
            if not self._identifies:
                return
            tensors = with_memory(tensors_in(batch))
            ticket.is_new = self._memory.add(tensors, ticket)
            form = ticket.num_samples, ticket.step.units is None, *map(_SHAPE, tensors)
            if form not in self._layouts.forms:
                self._note_form(form, ticket, tensors)
            ticket.is_indices = (
                len(tensors) == 1 and tensors[0].ndim == 1 and tensors[0].dtype is torch.int64
            )
            ticket.tensors = tuple(map(weakref.ref, tensors[:_MOST_PEEKS]))
            if peeks or self._mixes:
                ticket.peeks = _peeks(tensors[:_MOST_PEEKS])

    def _note_form(
        self, form: tuple[Any, ...], ticket: Ticket, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Remember where the rows of such a batch lie; a form that has them is looked at once."""
        self._layouts.note(tensors, ticket.size)
        ticket.has_rows = self._rows.has(tensors, ticket.size, units=ticket.step.units)
        if ticket.has_rows:
            self._layouts.forms.add(form)

    def retire(self, is_done: Callable[[Ticket], bool]) -> None:
        """Have tickets be found by memory alone from now on, as those that were trained on are."""
        with self._lock:
            self._live = [ticket for ticket in self._live if not is_done(ticket)]

    def end_loop(self) -> None:
        """Note that the loop has ended: what it handed out and was used is used up."""
        with self._lock:
            self._live = [ticket for ticket in self._live if not ticket.is_trained]
            for ticket in self._live:
                ticket.is_over = True

    def of(self, batch: Any) -> Match | None:
        """Return the tickets of a batch, as it was handed out, or of tensors of it.

        Raises:
            ValueError: its tensors are of no known batch, or of batches that weigh differently.
        """
        if not self._identifies:
            return self.match(())
        with self._lock:
            found = self._memory.find(with_memory(tensors_in(batch)))
            ticket = None if found is None else self._ticket_of(found)
        if ticket is None:
            raise invalid(
                "Balancer.step(batch)",
                "be one batch as the loader handed it out, with tensors, or tensors of it",
                f"a {type(batch).__name__} that is none",
                "Keep what the loader returned beside copies of it, and pass that.",
            )
        return Match((ticket,), ticket.weight, is_certain=True)

    def match(self, tensors: Sequence[torch.Tensor]) -> Match | None:
        """Return to which tickets a forward with these inputs belongs; None outside of a step."""
        with self._lock:
            live = self._live
            newest = live[-1] if live and tensors and self._identifies else None
        if newest is None or not newest.is_new:
            return self._by_evidence(tensors)
        # In nearly all loops they are tensors of the newest batch. By memory it would be the same.
        own = list(map(call, newest.tensors))
        for tensor in tensors:
            for one in own:
                if one is tensor:
                    break
            else:
                return self._by_evidence(tensors)
        return Match((newest,), newest.weight, 1.0, is_certain=True)

    def _by_evidence(self, tensors: Sequence[torch.Tensor]) -> Match | None:
        tensors = with_memory(tensors)
        with self._lock:
            found = self._memory.find(tensors) if self._identifies else None
            match = None if found is None else self._by_memory(found)
            if (match := match or _of_indices(self._live, tensors)) is not None:
                return match
            rows, views = self._layouts.rows_of(tensors)
            live = [
                one
                for one in self._live
                if not (one.is_over and one.num_backwards) or one.fits(rows, views)
            ]
        if not live:
            return None
        # Two batches of one size in one forward look like two views of one batch, and weigh the
        # same. Where sizes change later on, they do not: by then copies have to be recognised.
        self._mixes |= self._identifies and not any(ticket.size in rows for ticket in live)
        fitting = [ticket for ticket in live if ticket.fits(rows, views)]
        if len(live) == 1 or _agree(live):
            if not fitting and _exceeds(live, tensors):
                return Match(tuple(live), rows_of_several([one.num_samples for one in live]))
            strange = set() if fitting or not self._identifies else views
            return _alike(live)._replace(other_rows=max(strange, default=0))
        if not all(ticket.has_rows for ticket in live):
            fitting = copied(live, tensors)
        elif not _agree(fitting):
            fitting = copied(fitting or live, tensors)
        if _agree(fitting):
            return _alike(fitting)
        live.sort(key=lambda ticket: ticket.num_backwards > 0)
        return Match(tuple(live), unknown_batch([one.num_samples for one in live]), is_open=True)

    def _by_memory(self, found: Found[Ticket]) -> Match | None:
        """Return the match by whose memory it is; None if that does not decide it."""
        if not found.owners and self._live:
            return Match(
                tuple(self._live), rows_of_several([one.num_samples for one in self._live])
            )
        ticket = self._ticket_of(found)
        if ticket is None or (found.is_changed and ticket not in self._live):
            return None  # a buffer that something else was copied into
        return Match((ticket,), ticket.weight, found.share, is_certain=True)

    def _ticket_of(self, found: Found[Ticket]) -> Ticket | None:
        """Return the owner; of memory that is handed out again, the newest that is in use."""
        if len(found.owners) == 1:
            return found.owners[0]
        live = [one for one in found.owners if one in self._live]
        if _agree(found.owners):
            return (live or found.owners)[-1]
        return live[-1] if _agree(live) else None


def _of_indices(live: Sequence[Ticket], tensors: Sequence[torch.Tensor]) -> Match | None:
    """Return the oldest unused batch of indices, if the inputs have as many rows as that."""
    if not live or not all(ticket.is_indices for ticket in live):
        return None
    unused = (one for one in live if not (one.num_backwards or one.is_over))
    ticket = next(unused, live[-1])
    if ticket.size not in {len(tensor) for tensor in tensors if tensor.ndim}:
        return None
    return Match((ticket,), ticket.weight, is_certain=True)


def _peeks(tensors: Iterable[torch.Tensor]) -> tuple[Peek, ...]:
    return tuple(peek for tensor in tensors if (peek := Peek.of(tensor)) is not None)


def known(weight: Weight) -> float:
    """Return a weight that may have to be asked for."""
    return weight if isinstance(weight, float) else weight()


def _agree(tickets: Iterable[Ticket]) -> bool:
    """Return whether there are tickets, and all weigh alike."""
    return len({ticket.key for ticket in tickets}) == 1


def copied(tickets: Sequence[Ticket], tensors: Sequence[torch.Tensor]) -> list[Ticket]:
    """Return the tickets whose tensors the inputs may be copies of; none if all may be."""
    found = list(tickets)
    for tensor in tensors:
        shown = [one for one in tickets if one.shows_in(tensor)]
        found = [one for one in found if one in shown] if shown else found
    return found if len(found) < len(tickets) else []


def _exceeds(tickets: Sequence[Ticket], tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether an input begins with a copy of a batch and continues with rows of another."""
    return any(ticket.ends_in(tensor) for ticket in tickets for tensor in tensors)


def _alike(tickets: Sequence[Ticket]) -> Match:
    """Return the match with tickets that weigh alike: those that wait come first."""
    waiting = [ticket for ticket in tickets if not ticket.num_backwards]
    found = waiting + [ticket for ticket in tickets if ticket.num_backwards]
    return Match(tuple(found), found[0].weight, is_certain=len(found) == 1)
