"""Runs for the tests of a report: events with times to the microsecond, and files of them."""

import numpy as np

from evenstep._telemetry import JsonLines
from evenstep.events import RunEnded, RunStarted, StepMeasured, StepsAccounted

PARTS = (
    "input_s", "forward_s", "backward_s", "communication_s", "waiting_s", "optimizer_s",
    "evaluation_s", "checkpoint_s", "rest_s",
)  # fmt: skip


def started(world_size, **changed):
    """The start of a run."""
    names = tuple(f"node{rank}" for rank in range(world_size))
    devices = tuple("cpu" for _ in names)
    told = {"policy": "Auto()", "hosts": names, "devices": devices, "versions": ("torch 2.0",)}
    return RunStarted(world_size, 8 * world_size, 100, **(told | changed))


def measured(step, sizes, compute_s, **told):
    """A step as rank 0 tells it."""
    makespan_s = max(compute_s)
    idle_s = [makespan_s - each for each in compute_s]
    return StepMeasured(
        step=step,
        plan_epoch=0,
        batch_size=tuple(sizes),
        compute_s=tuple(compute_s),
        data_s=tuple(0.0 for _ in sizes),
        idle_s=tuple(idle_s),
        makespan_s=makespan_s,
        idle_share=sum(idle_s) / len(sizes) / makespan_s,
        **({"equal_split_s": None, "best_split_s": None, "wall_s": None} | told),
    )


def accounted(step, spent_s, num_steps=1):
    """Where the time of a step went: ``spent_s`` by part and rank."""
    lists = {name: tuple(times) for name, times in zip(PARTS, spent_s, strict=True)}
    wall_s = tuple(np.sum(spent_s, axis=0).tolist())
    return StepsAccounted(step=step, num_steps=num_steps, wall_s=wall_s, **lists)


def trained(num_steps, world_size, seed=0, **changed):
    """The events of a run whose times are drawn."""
    rng = np.random.default_rng(seed)
    yield started(world_size, **changed)
    for step in range(num_steps):
        compute_s = rng.gamma(4, 0.02, world_size)
        sizes = rng.integers(1, 16, world_size).tolist()
        worse, better = compute_s.max() * 1.5, compute_s.max() * 0.9
        yield measured(
            step,
            sizes,
            compute_s.tolist(),
            equal_split_s=worse if step > 2 else None,
            best_split_s=better if step > 2 else None,
            wall_s=compute_s.max() + 0.03 if step % 10 else None,
        )
        spent_s = np.round(rng.gamma(2, 0.01, (len(PARTS), world_size)), 6)
        spent_s[6:8] = 0.0
        if step % 7 < 3:  # each of its own, or four short ones together
            yield accounted(step, spent_s.tolist())
        elif step % 7 == 6:
            yield accounted(step, spent_s.tolist(), num_steps=4)
    yield RunEnded(num_steps)


def written(folder, events):
    """The folder of a run with these events, written as a run does."""
    file = JsonLines(folder / "events.jsonl")
    for event in events:
        file(event)
    file.close()
    return folder
