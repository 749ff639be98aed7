"""Where the time of a step went, by phase and rank."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import final

import numpy as np

from ..events import StepsAccounted

_MOST_OPEN = 1024  # steps: ranks hold their reports back for a moment, and a device may be late


class Phase(IntEnum):
    """What a rank's time goes to in a step. In those that end with all ranks, it meets others.

    The order is that of a report, and cannot change without the protocol.
    """

    INPUT = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    EVALUATION = 4
    CHECKPOINT = 5
    REST = 6
    REDUCTION = 7
    """After the own backward: the exchange of gradients, as far as it is exposed."""
    MEETING = 8
    """Collectives between hand-out and backward: DDP's buffers, counts of units, the user's."""
    MEAN = 9
    """``Balancer.mean`` and its kin."""
    PLAN = 10
    """The plan point."""


_FIRST_MET = Phase.REDUCTION


def time_by_phase(lasted_s: Sequence[float], phases: Sequence[Phase]) -> tuple[int, ...]:
    """Return how long each phase lasted, in microseconds: they add up to the step.

    Args:
        lasted_s: from each mark to the next in seconds, at least 0.
        phases: which phase that was.
    """
    spent_s = [0.0] * len(Phase)
    for phase, seconds in zip(phases, lasted_s, strict=True):
        spent_s[phase] += seconds
    return tuple([round(seconds * 1e6) if seconds else 0 for seconds in spent_s])


def accounted(steps: Sequence[int], spent_us: Sequence[Sequence[Sequence[int]]]) -> StepsAccounted:
    r"""Return where the time of all ranks went.

    Who comes last to a meeting waits for none: in each step and kind of meeting, the shortest time
    of any rank is communication, $c = \min_r m_r$, and the rest of a rank's time is waiting,
    $m_r - c$. Ranks' clocks are compared with nothing. Right where ranks leave a meeting together,
    as an all-reduce has them do. Where meetings of one kind in one step have different last ranks,
    some waiting counts as communication.

    Args:
        steps: their numbers, in order; at least one.
        spent_us: times by step, rank and phase, as ``time_by_phase`` gives them.
    """
    spent = np.array(spent_us, np.int64)
    met = spent[:, :, _FIRST_MET:]
    exchange = np.broadcast_to(met.min(axis=1, keepdims=True), met.shape).sum(axis=(0, 2))
    own = spent.sum(axis=0)

    def seconds(us: np.ndarray) -> tuple[float, ...]:
        return tuple((us / 1e6).tolist())

    return StepsAccounted(
        step=steps[-1],
        num_steps=len(steps),
        wall_s=seconds(own.sum(axis=1)),
        input_s=seconds(own[:, Phase.INPUT]),
        forward_s=seconds(own[:, Phase.FORWARD]),
        backward_s=seconds(own[:, Phase.BACKWARD]),
        communication_s=seconds(exchange),
        waiting_s=seconds(met.sum(axis=(0, 2)) - exchange),
        optimizer_s=seconds(own[:, Phase.OPTIMIZER]),
        evaluation_s=seconds(own[:, Phase.EVALUATION]),
        checkpoint_s=seconds(own[:, Phase.CHECKPOINT]),
        rest_s=seconds(own[:, Phase.REST]),
    )


@final
class StepAccounts:
    """Gathers what all ranks say of their steps, until there is enough of it for an event.

    Short steps are told several together. A step that some rank tells nothing of is left out.

    Args:
        world_size: number of workers.
        least_s: seconds of rank 0 in one event, at least.
    """

    def __init__(self, world_size: int, *, least_s: float = 0.1) -> None:
        self._world_size = world_size
        self._least_us = least_s * 1e6
        self._open: dict[int, dict[int, Sequence[int]]] = {}
        self._whole: list[tuple[int, dict[int, Sequence[int]]]] = []
        self._lasted_us = 0

    def add(self, rank: int, step: int, spent_us: Sequence[int]) -> bool:
        """Take in one rank's times of a step; return whether there is enough for an event."""
        known = self._open.setdefault(step, {})
        known[rank] = spent_us
        if len(known) == self._world_size:
            self._whole.append((step, self._open.pop(step)))
            self._lasted_us += sum(known[0])
        elif len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        return self._lasted_us >= self._least_us

    def take(self) -> list[tuple[int, list[Sequence[int]]]]:
        """Return all steps that are complete, with the times of all ranks."""
        whole, self._whole, self._lasted_us = self._whole, [], 0
        ranks = range(self._world_size)
        return [(step, [known[rank] for rank in ranks]) for step, known in whole]
