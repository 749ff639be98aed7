"""The interface every share policy implements, and what it returns."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Generic

from ..._types import FloatArray, State
from ._aggregation import Aggregation
from ._bandwidths import Links


@dataclass(frozen=True, slots=True, eq=False)
class ShareDecision(Generic[State]):
    """What a share policy decided, what it remembers, and why.

    Attributes:
        shares: part of the bytes that each rank sums, at least 0, adding up to 1, and 0 for ranks
            that are not servers, ``(world_size,)``.
        state: passed to the next ``update``; as plain as that of ``evenstep.Decision``.
        reason: a few words for people.
    """

    shares: FloatArray
    state: State
    reason: str


class AbstractSharePolicy(abc.ABC, Generic[State]):
    """Decides which part of the gradients each server sums.

    Like ``evenstep.policies.AbstractPolicy`` for samples, it is an immutable value whose memory is
    the state, without I/O, clock or framework. It gets the measured links, smoothed if they are
    noisy. ``plan_shares`` decides whether its shares are worth using.

    Attributes:
        name: what configurations and reports call it, such as ``"optimal"``.
    """

    __slots__ = ()

    name: ClassVar[str] = ""

    @abc.abstractmethod
    def init(self, aggregation: Aggregation) -> ShareDecision[State]:
        """Return the first decision, before any link is measured."""

    @abc.abstractmethod
    def update(self, aggregation: Aggregation, links: Links, state: State) -> ShareDecision[State]:
        """Return the next decision, leaving all arguments as they are."""
