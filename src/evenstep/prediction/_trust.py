"""Whether a reading far off what was expected is believed at once, or held back for a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .._types import FloatArray, IntArray

Mask = NDArray[np.bool_]

LASTING_S = 0.1
"""Seconds for which a worker has to be off before that counts as more than a pause."""


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What to make of one step's jumps.

    Attributes:
        hold: readings to leave out, ``(world_size,)``.
        accept: jumps to follow at once, ``(world_size,)``.
        memory: what the next step has to know.
    """

    hold: Mask
    accept: Mask
    memory: dict[str, Any]


def no_jumps_yet(world_size: int) -> dict[str, Any]:
    """Return the memory before the first step.

    The counts are a prior worth two and a half jumps, four of five of them passing: the first
    jump of a run is held back, and one that proved lasting is enough to trust the next.
    """
    return {
        "open": np.zeros(world_size, np.int64),
        "held_s": np.zeros(world_size),
        "lasting": 0.5,
        "passing": 2.0,
    }


def judge(
    jump: IntArray, seconds: FloatArray, *, ran: Mask, young: Mask, memory: dict[str, Any]
) -> Verdict:
    """Decide about jumps by what became of the ones before.

    A jump is held back, unless the step before jumped the same way and the two took ``LASTING_S``
    together (then it is lasting) or jumps have mostly proved lasting in this run. Steps of a
    millisecond have pauses of tens, for whatever else the machine does, and several in a row.
    One that was believed at once counts as passing if the next step jumps back. A worker's first
    readings are always followed: which of two is the odd one cannot be told.

    The threshold is low, 30 %, because errors cost unlike amounts: ignoring a worker that turned
    twice as slow doubles the step, while believing a single slow step costs the others their
    part of a few samples.

    Args:
        jump: -1 for a reading far too fast, 1 for one far too slow, else 0, ``(world_size,)``.
        seconds: what the steps of the reading took, ``(world_size,)``.
        ran: which workers were measured, ``(world_size,)``.
        young: which have too little behind them to be judged, ``(world_size,)``.
        memory: from the step before; left as it is.
    """
    # "open": jumps not settled yet. +-1 was held back, +-2 was believed at once.
    before: IntArray = memory["open"]
    # Forgotten at 2 % a step towards the prior: machines change their ways.
    lasting = 0.98 * memory["lasting"] + 0.02 * 0.5
    passing = 0.98 * memory["passing"] + 0.02 * 2.0
    if not (jump.any() or before.any()):
        none = np.zeros(len(ran), np.bool_)
        return Verdict(none, none, {**memory, "lasting": lasting, "passing": passing})

    was_held, was_believed = ran & (abs(before) == 1), ran & (abs(before) == 2)
    still = was_held & (jump == np.sign(before))
    held_s = np.where(still, memory["held_s"], 0.0) + seconds
    again = still & (held_s >= LASTING_S)
    undone = was_believed & (jump == -np.sign(before))

    chance = memory["lasting"] / (memory["lasting"] + memory["passing"])
    jumped = ran & (jump != 0)
    hold = jumped & ~(again | undone | young) if chance <= 0.3 else np.zeros_like(jumped)
    accept = jumped & ~hold
    unproven = accept & ~(again | undone | young)

    lasting += int(again.sum() + (was_believed & ~undone).sum())
    passing += int(undone.sum() + (was_held & ~still).sum())
    return Verdict(
        hold=hold,
        accept=accept,
        memory={
            "open": np.where(ran, np.where(hold, jump, np.where(unproven, 2 * jump, 0)), before),
            "held_s": np.where(ran, np.where(hold, held_s, 0.0), memory["held_s"]),
            "lasting": lasting,
            "passing": passing,
        },
    )
