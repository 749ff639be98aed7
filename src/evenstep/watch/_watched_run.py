"""What a watch knows at the end: what advice is given on."""

from __future__ import annotations

from dataclasses import dataclass

from .._diagnosis import Diagnosis
from .._types import IntArray


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a script made something that matters to balancing.

    Attributes:
        made: ``"DistributedDataParallel"``, ``"fully_shard"``, ``"FullyShardedDataParallel"`` or
            ``"DataLoader"``: the one that training reads.
        file: the innermost file of the user's own on the way there; empty where there is none.
        line: the line in it, from 1.
        library: the library that made it for the user, such as ``"accelerate"``; empty where the
            user's own line did.
    """

    made: str
    file: str
    line: int
    library: str


@dataclass(frozen=True, slots=True, eq=False)
class WatchedRun:
    """What all ranks told of the newest steps.

    A row is a step, or some short ones together: times, samples and sizes are sums over them.

    Attributes:
        hosts: host of every rank; empty where a rank did not say.
        devices: device of every rank, likewise.
        kind: how gradients are exchanged: ``"DDP"``, ``"FSDP2"``, ``"FSDP1"``; empty if not known.
        sites: where the script made its model and its loader; rank 0's.
        step: the newest step of each row, ``(num_rows,)``.
        num_steps: how many steps each row has, likewise.
        spent_us: as ``time_by_phase`` gives them, ``(num_rows, world_size, len(Phase))``. Own
            compute is the forward and the backward; under FSDP1 it is in the rest.
        num_samples: leading dimensions of the inputs of all forwards in training,
            ``(num_rows, world_size)``; 0 where they are not known.
        size: numbers or tokens in them, likewise.
        diagnosis: of the newest steps; None where there were too few.
    """

    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    kind: str
    sites: tuple[CallSite, ...]
    step: IntArray
    num_steps: IntArray
    spent_us: IntArray
    num_samples: IntArray
    size: IntArray
    diagnosis: Diagnosis | None
