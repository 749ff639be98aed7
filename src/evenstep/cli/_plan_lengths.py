"""What ``evenstep plan`` says of lengths: what they and the speeds save, each alone and both."""

from __future__ import annotations

import numpy as np

from .._render._words import paragraph, seconds, text_table
from ..sim import Scenario
from ._common import refused
from ._length_splits import (
    WAYS,
    LengthSplits,
    check_lengths_alone,
    savings,
    split_steps,
    workload_of,
)
from ._plan_text import Question

_LEARNING, _COUNTED = 40, 60  # steps until costs are learnt, and those that are shown


def answer_lengths(
    question: Question, lengths: str | None, *, padded: bool, hidden_size: int | None
) -> LengthSplits | None:
    """Return steps with samples of such lengths, computing and overhead; None without any.

    A sample of mean cost takes what the workers' speeds say, and no step differs by luck. The
    planners of training plan them; steps count once costs are learnt.

    Raises:
        ValueError: the lengths cannot be, or do not go together with caps; the message names
            the option.
    """
    if lengths is None:
        check_lengths_alone("plan", padded=padded, hidden_size=hidden_size)
        return None
    if question.max_batch_size is not None:
        rule, remedy = (
            "be left out where batches have caps",
            "Caps count samples: leave out `--max`.",
        )
        raise refused("plan", "--lengths", rule, lengths, remedy)
    slope_s = np.tile(question.times.slope_s, (_LEARNING + _COUNTED, 1))
    fixed_s = np.array(question.times.intercept_s)
    workers = Scenario("plan", fixed_s, slope_s, np.ones_like(slope_s))
    total = question.global_batch_size
    workload = workload_of("plan", workers, lengths, total, padded=padded, hidden_size=hidden_size)
    return split_steps(workload, skip=_LEARNING).longer(question.overhead_s)


def lengths_text(splits: LengthSplits, width: int | None) -> str:
    """Return the answer as a table and a sentence, for a terminal."""
    rows = [
        [way, seconds(step_s), f"{splits.equal_s / step_s:.2f}"]
        for way, step_s in zip(WAYS, splits.steps_s, strict=True)
    ]
    table = text_table(["with these lengths", "step", "times as fast"], rows, width=width)
    return f"{table}\n\n{paragraph(savings(splits), width)}"
