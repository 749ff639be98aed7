"""What each reduction of gradients was made of, so that rank 0 can compare the ranks."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .._exchange._reductions import Reduced
from ..exceptions import EvenstepWarning
from ._finite import Look
from ._model._protocols import Weight
from ._tickets import Match, Ticket


@dataclass(eq=False, slots=True)
class ForwardUse:
    """A forward that may have a backward.

    Attributes:
        match: to which batch it belongs.
        ticket: of that batch, or the one most likely: where there are several, they weigh alike.
        weight: what the gradient at its output is multiplied by.
        model: number of the model.
        reduces: whether its backward reduces gradients; None where that is not known.
        looks: at the gradients that its backward began with.
    """

    match: Match
    ticket: Ticket
    weight: Weight
    model: int
    reduces: bool | None
    looks: list[Look] = field(default_factory=list)

    @classmethod
    def of(cls, match: Match, model: int, *, reduces: bool | None) -> ForwardUse:
        """Return the use of a forward that was matched."""
        return cls(match, match.tickets[0], match.weight, model, reduces)


class UseBooks:
    """The forwards of each model since its last reduction that have had a backward."""

    def __init__(self) -> None:
        self._open: defaultdict[int, list[ForwardUse]] = defaultdict(list)
        self._numbers: defaultdict[int, int] = defaultdict(int)
        self._has_warned = False

    def next_number(self, model: int) -> int:
        """Return the number of the model's next reduction."""
        return self._numbers[model]

    def add(self, uses: Iterable[ForwardUse]) -> list[Reduced]:
        """Take note of a backward through ``uses``; return what was reduced at its end."""
        reducing: dict[int, None] = {}
        for use in uses:
            if use.reduces is None:
                continue
            self._open[use.model].append(use)
            if use.reduces:
                reducing[use.model] = None
                use.reduces = None  # DDP reduces in the first backward after a forward
        return [self._reduced(model) for model in reducing]

    def _reduced(self, model: int) -> Reduced:
        uses = self._open.pop(model)
        number = self._numbers[model]
        self._numbers[model] += 1
        if len(uses) == 1 and len(uses[0].match.tickets) == 1:  # as nearly always
            return Reduced(model, number, {uses[0].ticket.step.number: _share_of(uses[0])})
        shares: dict[int, float | None] = {}
        maybe: set[int] = set()
        for use in uses:
            steps = {ticket.step.number for ticket in use.match.tickets}
            if len(steps) > 1:
                maybe |= steps
                continue
            step, share = steps.pop(), _share_of(use)
            before = shares.get(step, 0.0)
            shares[step] = None if before is None or share is None else before + share
        self._warn_of_uneven(uses)
        return Reduced(model, number, shares, tuple(sorted(maybe)))

    def _warn_of_uneven(self, uses: Sequence[ForwardUse]) -> None:
        if self._has_warned:
            return
        parts: defaultdict[int, set[int]] = defaultdict(set)
        for use in uses:
            if len(use.match.tickets) == 1 and use.match.share is not None:
                parts[id(use.ticket)].add(round(use.match.share * use.ticket.size))
        for use in uses:
            sizes = parts.get(id(use.ticket), set())
            if len(sizes) > 1:
                self._has_warned = True
                warnings.warn(
                    f"A batch of {use.ticket.num_samples} samples went through the model in parts "
                    f"of {sorted(sizes)}. That is exact if each part's loss is multiplied by its "
                    f"share of the batch, `len(part) / len(batch)`. It is wrong if each is divided "
                    f"by the number of parts, because the parts differ in size. `loader.steps()` "
                    f"splits batches and weights the parts by itself.",
                    EvenstepWarning,
                    stacklevel=2,
                )
                return


def _share_of(use: ForwardUse) -> float | None:
    """Return which part of its batch a forward had, if that can be compared between ranks.

    Micro-batches and stand-ins are parts of their own: only whole batches are counted.
    """
    ticket = use.ticket
    counts = ticket.num_samples > 0 and ticket.step.num_forwards == 1
    return use.match.share if counts else None
