"""What parameters, gradients and the optimizer's state need on a rank, by how a model is held."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STATES = {"adam": 2, "momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter: AdamW as Adam, SGD with momentum."""

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a parameter, of its gradient and of each number of state; autocast keeps float32."""

PLANNED = 0.9
"""Share of a memory that is planned; the rest is for the device's own buffers and what varies."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    r"""Bytes that a rank needs before its first sample, for each way to hold the model.

    With $P$ bytes of parameters, as many of gradients, $S P$ of state, $W$ ranks and $L$ equal
    layers:

    | way | bytes |
    |---|---|
    | DDP | $(3 + S) P$ |
    | DDP with ``gradient_as_bucket_view=True`` | $(2 + S) P$ |
    | FSDP2 in loops over ``loader.steps()`` | $(2 + S) P / W + 2 P$ |
    | FSDP2 in loops over whole batches | $(2 + S) P / W + 4 P / L$ |

    DDP's buckets hold gradients a second time. A step over ``loader.steps()`` keeps all parameters
    and gradients. Else two layers are gathered at once while the gradient of one is reduced.

    Ranks need the same, whatever memory they have. Buffers of the collectives come on top: over
    gloo they took 1.7 bytes a parameter in each way.

    Attributes:
        ddp_bytes: plain DDP.
        ddp_view_bytes: DDP with ``gradient_as_bucket_view=True``.
        fsdp2_steps_bytes: FSDP2 in loops over ``loader.steps()``.
        fsdp2_bytes: FSDP2 in loops over whole batches.
    """

    ddp_bytes: int
    ddp_view_bytes: int
    fsdp2_steps_bytes: int
    fsdp2_bytes: int


def memory_needs(
    parameters: int, world_size: int, *, optimizer: str, dtype: str, num_layers: int
) -> MemoryNeeds:
    """Return what each way to hold a model needs on a rank.

    Args:
        parameters: numbers that are trained.
        world_size: ranks that the model is sharded over.
        optimizer: a key of ``STATES``.
        dtype: a key of ``ELEMENT_BYTES``.
        num_layers: equal parts that FSDP2 gathers one by one.
    """
    states, plain = STATES[optimizer], parameters * ELEMENT_BYTES[dtype]
    shard = math.ceil((2 + states) * plain / world_size)
    return MemoryNeeds(
        (3 + states) * plain,
        (2 + states) * plain,
        shard + 2 * plain,
        shard + math.ceil(4 * plain / num_layers),
    )


def left_bytes(need_bytes: int, memory_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return what is left for samples on each rank; below 0 where the model does not fit."""
    return tuple(math.floor(PLANNED * each) - need_bytes for each in memory_bytes)
