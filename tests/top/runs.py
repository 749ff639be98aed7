"""A run as its events tell of it, of any length and with any number of ranks."""

import json

from evenstep.events import (
    Rebalanced,
    RunStarted,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
    to_record,
)

DIAGNOSED = WaitingDiagnosed(
    step=9,
    num_steps=9,
    step_s=0.3,
    waiting_share=0.25,
    explained_share=0.9,
    causes=("slow worker",),
    ranks=(1,),
    lost_share=(0.23,),
    evidence=("computes 300 ms, the median is 200 ms",),
    remedy=("balance by speed",),
)


def started(world_size=4, *, num_steps=100):
    hosts = tuple(f"node{rank // 2}" for rank in range(world_size))
    devices = tuple(f"cuda:{rank % 2} NVIDIA H200" for rank in range(world_size))
    return RunStarted(world_size, 32 * world_size, num_steps, "Auto()", hosts, devices)


def measured(step, world_size=4, *, slow=1, wall_s=0.32, data_s=0.0):
    """A step in which one rank takes 0.3 s, the others 0.2 s."""
    compute_s = tuple(0.3 if rank == slow else 0.2 for rank in range(world_size))
    idle_s = tuple(0.3 - own_s for own_s in compute_s)
    return StepMeasured(
        step=step,
        plan_epoch=0,
        batch_size=(32,) * world_size,
        compute_s=compute_s,
        data_s=(data_s,) * world_size,
        idle_s=idle_s,
        makespan_s=0.3,
        idle_share=sum(idle_s) / 0.3 / world_size,
        equal_split_s=0.4,
        best_split_s=0.25,
        wall_s=wall_s,
    )


def accounted(step, world_size=4, *, waiting_s=0.05):
    every = (waiting_s,) * world_size
    free = (0.0,) * world_size
    parts = [free, every, every, free, every, free, free, free, free]
    return StepsAccounted(step, 1, (3 * waiting_s,) * world_size, *parts)


def events(num_steps=10, world_size=4):
    """A run without its end."""
    yield started(world_size)
    yield Rebalanced(0, 0, (32,) * world_size, "equal sizes to begin with")
    for step in range(num_steps):
        yield measured(step, world_size)
        yield accounted(step, world_size)


def lines(told):
    """What a file has of events."""
    records = [{"event": "Schema", "version": 1}, *map(to_record, told)]
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)
