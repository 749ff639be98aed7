"""Events of a short run, as a hook is given them."""

from evenstep.events import (
    ExchangeMeasured,
    PolicyFailed,
    Rebalanced,
    RunEnded,
    RunStarted,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
)


def measured(step, sizes, compute_s):
    """What a step took; every worker waits 0.01 s for input."""
    makespan_s = max(compute_s)
    idle_s = tuple(makespan_s - each for each in compute_s)
    share = sum(idle_s) / (len(sizes) * makespan_s)
    times = compute_s, (0.01,) * len(sizes), idle_s
    return StepMeasured(step, 0, sizes, *times, makespan_s, share, 0.8, None, 0.5)


RUN = [
    RunStarted(2, 8, 5, "Auto()", ("a", "b"), ("cpu", "cpu")),
    measured(0, (4, 4), (0.1, 0.4)),
    Rebalanced(1, 1, (6, 2), "why"),
    measured(1, (6, 2), (0.15, 0.2)),
    PolicyFailed(1, "broke", "Mine"),
    StepsAccounted(1, 2, (1.0, 1.0), *[(0.25, 0.5)] * 9),
    WaitingDiagnosed(1, 2, 0.5, 0.25, 0.9, (), (), (), (), ()),
    ExchangeMeasured(1, 0, 0.05, None),
    RunEnded(2),
]


def shown(hook, events=RUN):
    """Give ``hook`` all events and return it."""
    for event in events:
        hook(event)
    return hook
