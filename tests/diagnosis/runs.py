"""Times of ranks that meet in the reduction, as a diagnoser is shown them."""

import numpy as np

from evenstep._diagnosis import Cause, Diagnoser, Phase

BASE = {"FORWARD": 30_000, "BACKWARD": 60_000, "OPTIMIZER": 5_000, "INPUT": 2_000, "REST": 1_000}
LATE = ("OPTIMIZER", "EVALUATION", "CHECKPOINT", "REST", "INPUT")


def steps(num_steps, world_size, *, late=None, seed=0, exchange=2_000):
    """Return times of ranks that meet in the reduction alone, and differ by two percent.

    ``late(step, rank)`` are microseconds by phase that a rank takes longer.
    """
    rng = np.random.default_rng(seed)
    before, found = [0] * world_size, []
    for step in range(num_steps):
        rows = []
        for rank in range(world_size):
            row = [0] * len(Phase)
            more = late(step, rank) if late else {}
            for name in BASE | more:
                mean = BASE.get(name, 0)
                row[Phase[name]] = int(mean * rng.normal(1, 0.02) + more.get(name, 0))
            rows.append(row)
        came = [
            b + row[Phase.FORWARD] + row[Phase.BACKWARD] + row[Phase.MEETING]
            for b, row in zip(before, rows, strict=True)
        ]
        for row, at in zip(rows, came, strict=True):
            row[Phase.REDUCTION] = max(came) - at + exchange
        before = [sum(row[Phase[name]] for name in LATE) for row in rows]
        found.append(rows)
    return found


def shown(found, *, clues=None, ask_every=None, **settings):
    """Return a diagnoser that was shown these steps."""
    diagnoser = Diagnoser(len(found[0]), **settings)
    for step, spent_us in enumerate(found):
        diagnoser.add(step, spent_us, clues(step) if clues else None)
        if ask_every and step % ask_every == 0:
            diagnoser.diagnose()
    return diagnoser


def names(found):
    """Causes with their ranks; None of those that are no rank's."""
    both = zip(found.causes, found.ranks, strict=True)
    return [(Cause(cause), None if rank < 0 else rank) for cause, rank in both]
