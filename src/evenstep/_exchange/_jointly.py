"""Between the planner of shares and that of sizes, on rank 0: what sizes are to make up for."""

from __future__ import annotations

from typing import Protocol, final

import numpy as np

from .._types import FloatArray
from ..control import Computing, JointSizes
from ..control import Exchange as ObservedExchange
from ..events import Hook, JointlyPlanned
from ..sharding import Links
from ._internal import fault_in_words, log_fault


class Sizes(Protocol):
    """Decides the batch sizes."""

    def computing(self, step: int) -> Computing | None:
        """Return what is known of computing in ``step``."""

    def compensate(self, extra_s: FloatArray) -> None:
        """Have sizes make up for so much of each rank's exchange."""


@final
class Jointly:
    """Shows every step to ``JointSizes`` and hands on what it says. On the thread of the shares.

    Args:
        joint: says what sizes make up for.
        sizes: decides them.
        emit: takes events.
    """

    def __init__(self, joint: JointSizes, sizes: Sizes, emit: Hook) -> None:
        self._joint, self._sizes, self._emit = joint, sizes, emit
        self._is_over = False

    def observe(
        self,
        step: int,
        exchange: ObservedExchange,
        links: Links | None,
        shares: FloatArray | None,
    ) -> None:
        """Take in the exchange of ``step``, by ``shares`` or plain; nothing that it does raises."""
        if exchange.problem() or self._is_over:
            return
        before = self._joint.extra_s
        try:
            computing = self._sizes.computing(step)
            events = self._joint.observe(step, computing, links, shares)
            if self._joint.extra_s is not before:
                self._sizes.compensate(self._joint.extra_s)
        except Exception as error:  # training goes on
            log_fault(step, error, "Sizes make up for no part of the exchange any more.")
            self.end(step, fault_in_words(error))
            return
        for event in events:
            self._emit(event)

    def end(self, step: int, reason: str) -> None:
        """Have sizes make up for nothing for the rest of the run."""
        self._is_over = True
        nothing = np.zeros_like(self._joint.extra_s)
        if self._joint.is_joint:
            self._sizes.compensate(nothing)
        self._emit(JointlyPlanned(step, tuple(nothing.tolist()), None, None, reason))
