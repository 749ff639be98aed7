"""Which handed-out batch a forward belongs to: the weight of a gradient follows from the batch.

Each batch that a loop gets opens a ticket. A forward is matched to tickets by evidence alone:

1. by identity: an input shares memory with a handed-out tensor (itself, a view, a split);
2. all tickets in use weigh alike, so that it does not matter which one it is;
3. by size: a leading dimension of an input equals the samples of one ticket only;
4. by value: an input begins with a copy of a handed-out tensor, as on another device.

The order in which batches are handed out and used is no evidence: a loop may fetch ahead, keep
batches and use them again. Where nothing tells, the weight is an error that names the remedy,
raised in the backward, as a forward without one (an evaluation) needs no weight.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..exceptions import invalid
from ._containers import tensors_in
from ._model._weighting import Weight
from ._peek import Peek
from ._under_way import StepUnderWay

# A batch that was fetched and has not been used after so many others: no prefetcher looks so far
# ahead. It can still be told by identity.
_MOST_WAITING = 64
_MOST_OWNERS = 8  # batches at one address: with more it is a constant, such as a mask
_MOST_PARTS = 4096  # tensors in one storage, as where all batches are slices of one
_MOST_PEEKS = 8  # tensors of a batch that are looked at
_MOST_RANGES = 64  # newest batches in one storage whose splits are recognised


@dataclass(eq=False, slots=True)
class Ticket:
    """A batch that was handed out: for one forward, or for several.

    Attributes:
        step: the step it belongs to.
        num_samples: samples in it that count; 0 for a stand-in of weight 0.
        weight: what its gradient is multiplied by.
        key: equal for tickets with equal weights.
        is_last: whether it is the step's last one.
        is_over: whether the loop that handed it out has ended.
        num_backwards: how many its forwards have had.
        peeks: some values of its tensors.
    """

    step: StepUnderWay
    num_samples: int
    weight: Weight
    key: Any
    is_last: bool
    is_over: bool = False
    num_backwards: int = 0
    peeks: tuple[Peek, ...] = ()

    @property
    def size(self) -> int:
        """Samples in the batch, a stand-in included."""
        return max(self.num_samples, 1)


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a forward's batch.

    Attributes:
        tickets: those it may belong to, the oldest first; one if it is certain.
        weight: of its gradient.
        share: which part of the batch it has, where the inputs tell; None where they do not.
        is_open: whether nothing here tells which of the tickets it is: the weight raises.
    """

    tickets: tuple[Ticket, ...]
    weight: Weight
    share: float | None = None
    is_open: bool = False


class _Storage:
    """Memory of which handed-out tensors are parts: mostly of one, so made in little time.

    Args:
        memory: it; the weak reference keeps its address from being given to other memory.
    """

    __slots__ = ("alive", "parts")

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.alive = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        # First address, address past the last, ticket, number of elements; the newest come last.
        self.parts: list[tuple[int, int, Ticket, int]] = []

    def owners(self, first: int, size: int) -> list[tuple[Ticket, int]]:
        """Return the tickets of what begins at an address, or else of what it lies in."""
        at = [(part[2], part[3]) for part in self.parts if part[0] == first]
        if at and (len(at) > 1 or at[0][1] >= size):
            return at
        newest = self.parts[-_MOST_RANGES:]
        return [(part[2], part[3]) for part in newest if part[0] <= first < part[1]] or at


class Tickets:
    """The tickets of a run on this rank. Safe to use from several threads.

    Args:
        identifies: whether batches are recognised by their memory; not needed by a single rank.
    """

    def __init__(self, *, identifies: bool) -> None:
        self._identifies = identifies
        self._lock = threading.Lock()
        self._live: list[Ticket] = []
        # The weak reference keeps the address from being given to other memory.
        self._storages: OrderedDict[int, _Storage] = OrderedDict()

    def open(self, ticket: Ticket, batch: Any, *, peeks: bool = True) -> None:
        """Note that ``batch`` is handed out with ``ticket``.

        Args:
            ticket: what is known of it.
            batch: as the loop gets it.
            peeks: whether copies of it may have to be recognised.
        """
        with self._lock:
            self._live.append(ticket)
            del self._live[:-_MOST_WAITING]
            if self._identifies:
                tensors = tensors_in(batch)
                self._forget_freed(len(tensors) + 1)  # more than come
                for tensor in tensors:
                    self._register(tensor, ticket)
                if peeks:
                    seen = map(Peek.of, tensors[:_MOST_PEEKS])
                    ticket.peeks = tuple(peek for peek in seen if peek is not None)

    def retire(self, is_done: Callable[[Ticket], bool]) -> None:
        """Have tickets be found by identity alone from now on."""
        with self._lock:
            self._live = [ticket for ticket in self._live if not is_done(ticket)]

    def end_loop(self) -> None:
        """Note that the loop has ended: what it handed out and was used is used up."""
        with self._lock:
            self._live = [ticket for ticket in self._live if not ticket.num_backwards]
            for ticket in self._live:
                ticket.is_over = True

    def of(self, batch: Any) -> Match | None:
        """Return the tickets of a batch, as it was handed out, or of tensors of it.

        Raises:
            ValueError: its tensors are nobody's, or those of batches that weigh differently.
        """
        if not self._identifies:
            return self.match(())
        with self._lock:
            found = self._owners_of(tensors_in(batch))
            match = None if found is None else self._resolved(found[0], None)
        if match is None or (callable(match.weight) and not _agree(match.tickets)):
            raise invalid(
                "Balancer.step(batch)",
                "be one batch as the loader handed it out, or tensors of it",
                f"a {type(batch).__name__} that is none",
                "Keep what the loader returned beside copies of it, and pass that.",
            )
        return match

    def match(self, tensors: Sequence[torch.Tensor]) -> Match | None:
        """Return to which tickets a forward with these inputs belongs; None outside of a step."""
        with self._lock:
            found = self._owners_of(tensors) if self._identifies else None
            if found is not None:
                return self._resolved(*found)
            sizes = {int(tensor.shape[0]) for tensor in tensors if tensor.ndim}
            live = [
                ticket
                for ticket in self._live
                if not (ticket.is_over and ticket.num_backwards) or ticket.size in sizes
            ]
        if not live:
            return None
        if _agree(live):
            fits = any(ticket.size in sizes for ticket in live) or not _exceeds(live, tensors)
            return _alike(live) if fits else Match(tuple(live), _several(live))
        sized = [ticket for ticket in live if ticket.size in sizes]
        if not _agree(sized):
            sized = _copied(sized or live, tensors)
        if _agree(sized):
            return _alike(sized)
        live.sort(key=lambda ticket: ticket.num_backwards > 0)
        return Match(tuple(live), _unknown(live), is_open=True)

    def _resolved(self, found: list[Ticket], share: float | None) -> Match:
        if _agree(found):
            return Match(tuple(found), found[0].weight, share)
        live = [ticket for ticket in found if ticket in self._live]
        if live and _agree(live):  # memory that is filled anew for each batch holds the newest
            return Match(tuple(live), live[0].weight, share)
        return Match(tuple(found), _unknown(found))

    def _owners_of(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[Ticket], float | None] | None:
        """Return whose memory the inputs are; None if they are nobody's."""
        found: list[tuple[Ticket, int]] | None = None
        size = 0
        for tensor in tensors:
            owners = self._owners(tensor)
            if not owners:
                continue
            if found is None:
                found, size = owners, tensor.numel()
                continue
            both = [pair for pair in found if any(pair[0] is owner for owner, _ in owners)]
            found = both or [*found, *owners]  # of two batches at once
        if found is None:
            return None
        whole = found[0][1]
        share = size / whole if whole and size <= whole else None
        return sorted({id(t): t for t, _ in found}.values(), key=lambda t: t.step.number), share

    def _owners(self, tensor: torch.Tensor) -> list[tuple[Ticket, int]]:
        if not _has_memory(tensor):
            return []
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        owners = [] if storage is None else storage.owners(tensor.data_ptr(), tensor.numel())
        return [] if len(owners) >= _MOST_OWNERS else owners

    def _register(self, tensor: torch.Tensor, ticket: Ticket) -> None:
        if not _has_memory(tensor):
            return
        memory = tensor.untyped_storage()
        storage = self._storages.get(memory._cdata)
        if storage is None:
            storage = self._storages[memory._cdata] = _Storage(memory)
        first, size = tensor.data_ptr(), tensor.numel()
        storage.parts.append((first, first + size * tensor.element_size(), ticket, size))
        if len(storage.parts) > _MOST_PARTS:
            del storage.parts[: _MOST_PARTS // 2]

    def _forget_freed(self, count: int) -> None:
        """Look whether the storages that were not looked at for longest have been freed."""
        for _ in range(min(count, len(self._storages))):
            number, storage = self._storages.popitem(last=False)
            if not storage.alive.expired():  # type: ignore[no-untyped-call]
                self._storages[number] = storage


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _agree(tickets: Iterable[Ticket]) -> bool:
    """Tell whether there are tickets, and all weigh alike."""
    return len({ticket.key for ticket in tickets}) == 1


def _copied(tickets: Sequence[Ticket], tensors: Sequence[torch.Tensor]) -> list[Ticket]:
    """Return those of which every tensor that is a copy of any may be one."""
    found = list(tickets)
    for tensor in tensors:
        shown = [one for one in tickets if any(peek.shows(tensor) for peek in one.peeks)]
        found = [one for one in found if one in shown] if shown else found
    return found if len(found) < len(tickets) else []


def _exceeds(tickets: Sequence[Ticket], tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether an input begins with a copy of a batch and goes on with rows of another.

    Several views of one batch have as many rows each; a part of it has fewer.
    """
    return any(
        tensor.ndim
        and tensor.shape[0] > ticket.size
        and tensor.shape[0] % ticket.size
        and any(peek.shows(tensor) for peek in ticket.peeks)
        for ticket in tickets
        for tensor in tensors
    )


def _alike(tickets: Sequence[Ticket]) -> Match:
    """Return the match with tickets that weigh alike: those that wait come first."""
    waiting = [ticket for ticket in tickets if not ticket.num_backwards]
    return Match(tuple(waiting or tickets), tickets[0].weight)


def _several(tickets: Sequence[Ticket]) -> Weight:
    size = tickets[-1].num_samples

    def unknown() -> NoReturn:
        raise RuntimeError(
            f"A forward began with a batch of {size} samples and went on with rows that are not of "
            f"it: no single weight is right for rows of several batches. Give each batch a forward "
            f"of its own. If the rows are the batch's own, say so around the forward: "
            f"`with balancer.step(batch): ...`."
        )

    return unknown


def _unknown(tickets: Sequence[Ticket]) -> Weight:
    sizes = [ticket.num_samples for ticket in tickets]

    def unknown() -> NoReturn:
        raise RuntimeError(
            f"No rank can tell which batch this backward belongs to: batches of {sizes} samples "
            f"are in use, its inputs are none of their tensors, and no size of theirs tells. "
            f"Say it: `with balancer.step(batch): loss = ...`, with `batch` as the loader handed "
            f"it out, around the forward."
        )

    return unknown
