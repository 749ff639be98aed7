"""What a run comes to, step by step in plain Python: slow, and plainly right."""

from collections import defaultdict
from itertools import pairwise
from statistics import fmean

from evenstep.events import StepMeasured, StepsAccounted

from .recorded import PARTS


def steps_of(events):
    """All measured steps."""
    return [event for event in events if isinstance(event, StepMeasured)]


def by_stretch(events, width, value):
    """The mean of ``value(step)`` by stretch, where it is known."""
    found = defaultdict(list)
    for step in steps_of(events):
        if (known := value(step)) is not None:
            found[step.step // width].append(known)
    return {at: fmean(values) for at, values in found.items()}


def whole_steps(events):
    """Every step with its whole time, which the next one tells."""
    steps = steps_of(events)
    return [
        (step, after.wall_s)
        for step, after in pairwise(steps)
        if after.step == step.step + 1 and after.wall_s is not None
    ]


def savings(events):
    """Elapsed, saved and left seconds, and the share that is saved."""
    whole = {step.step: wall_s for step, wall_s in whole_steps(events)}
    steps = steps_of(events)
    elapsed_s = sum(whole.get(step.step, step.makespan_s) for step in steps)
    known = [step for step in steps if step.equal_split_s is not None]
    saved_s = sum(step.equal_split_s - step.makespan_s for step in known)
    left_s = sum(step.makespan_s - step.best_split_s for step in known)
    both = [step for step in known if step.step in whole]
    more_s = sum(step.equal_split_s - step.makespan_s for step in both)
    share = more_s / (more_s + sum(whole[step.step] for step in both))
    return elapsed_s, saved_s, left_s, share


def of_rank(events, rank, width):
    """Samples per second of a rank, and the part of computing that it waits, by stretch."""
    samples, compute_s, idle_s, makespan_s = (defaultdict(float) for _ in range(4))
    for step in steps_of(events):
        at = step.step // width
        samples[at] += step.batch_size[rank]
        compute_s[at] += step.compute_s[rank]
        idle_s[at] += step.makespan_s - step.compute_s[rank]
        makespan_s[at] += step.makespan_s
    speeds = {at: samples[at] / compute_s[at] for at in samples}
    return speeds, {at: idle_s[at] / makespan_s[at] for at in samples}


def slowest(events, world_size):
    """Steps in which each rank was the slowest, and what the others waited for it."""
    num, caused_s = [0] * world_size, [0.0] * world_size
    for step in steps_of(events):
        rank = step.compute_s.index(max(step.compute_s))
        num[rank] += 1
        caused_s[rank] += sum(step.makespan_s - each for each in step.compute_s)
    return num, caused_s


def accounts(events, width):
    """Mean seconds of a step by stretch and part, and each rank's share of waiting."""
    spent_s, num = defaultdict(float), defaultdict(int)
    waited_s, wall_s = defaultdict(float), defaultdict(float)
    for event in events:
        if not isinstance(event, StepsAccounted):
            continue
        for step in range(event.step - event.num_steps + 1, event.step + 1):
            at = step // width
            for rank, own_s in enumerate(event.wall_s):
                num[at] += 1
                waited_s[at, rank] += event.waiting_s[rank] / event.num_steps
                wall_s[at, rank] += own_s / event.num_steps
                for part in PARTS:
                    spent_s[at, part] += getattr(event, part)[rank] / event.num_steps
    means = {key: spent_s[key] / num[key[0]] for key in spent_s}
    return means, {key: waited_s[key] / wall_s[key] for key in wall_s}
