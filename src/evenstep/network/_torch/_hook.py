"""DDP's communication hook: buckets go to the reducer, or to plain all-reduce."""

# Without `from __future__ import annotations`: DDP compares a hook's annotations with types.

from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..._private_torch import at_end_of_backward, comm_hooks_of
from ...exceptions import invalid
from ._reducer import ShardedReducer


@final
class BucketState:
    """What the hook of one DDP knows.

    Args:
        reducer: averages buckets while a split is in force; set to None, it is plain all-reduce
            from then on.
        group: DDP's own, for plain all-reduce.
    """

    def __init__(self, reducer: ShardedReducer, group: dist.ProcessGroup) -> None:
        self.reducer: ShardedReducer | None = reducer
        self.group = group

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave nothing in a copy or a pickle of the model, where DDP has no hook either."""
        return object, ()


def shard_gradients(ddp: DistributedDataParallel, reducer: ShardedReducer) -> BucketState:
    """Have the gradients of ``ddp`` averaged by ``reducer``, or by all-reduce without a split.

    Composes with what DDP offers: ``no_sync``, ``find_unused_parameters``, ``static_graph``,
    ``gradient_as_bucket_view``, mixed precision, clipping, parameters without a gradient. NaN and
    infinity come out on all ranks, as of an all-reduce. Not with another communication hook.

    Args:
        ddp: over the reducer's workers, in their order.
        reducer: of this rank, which has gradients.

    Returns:
        What the hook knows. Once that has no reducer, ``ddp`` can be given to another one.

    Raises:
        ValueError: ``ddp`` has a hook already, is over other ranks, or has sparse gradients.
    """
    former = _released(ddp)
    if (hooks := comm_hooks_of(ddp)) and former is None:
        rule, got = "have no communication hook yet", hooks[0][0].__name__
        raise invalid("shard_gradients(ddp)", rule, got, "Give `wire=` to the reducer instead.")
    size = ddp.process_group.size()
    if size != reducer.num_workers:
        rule = f"be over the reducer's {reducer.num_workers} workers"
        raise invalid("shard_gradients(ddp)", rule, size, "Give `process_group=` to DDP.")
    if sparse := _sparse_layers(ddp):
        rule, remedy = "have dense gradients", "Leave `sparse=True` out, or use plain all-reduce."
        raise invalid("shard_gradients(ddp)", rule, f"sparse ones of {sparse[0]!r}", remedy)
    if former is not None:
        former.reducer = reducer
        return former
    state = BucketState(reducer, ddp.process_group)
    ddp.register_comm_hook(state, reduce_bucket)
    return state


def reduce_bucket(
    state: BucketState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # in none of torch's stubs
) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket on and return at once; a lost rank raises at the backward's end.

    Raises:
        WorkerLostError: a rank was lost before.
    """
    reducer = state.reducer
    if reducer is not None:
        reducer.num_buckets += 1
    if reducer is None or reducer.split is None:
        return allreduce_hook(state.group, bucket)
    if bucket.index() == 0:
        # Ahead of DDP's own wait, which would make an error of an unknown type of it.
        at_end_of_backward(reducer.settle)
    return reducer.reduce(bucket.buffer(), ends=bucket.is_last(), model=state)


def _released(ddp: DistributedDataParallel) -> BucketState | None:
    """Return what the hook of ``ddp`` knows, if it is one of ours that is not used any more."""
    for _, state in comm_hooks_of(ddp):
        if isinstance(state, BucketState) and state.reducer is None:
            return state
    return None


def _sparse_layers(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of layers whose gradients DDP expects to be sparse."""
    return [
        name
        for name, layer in ddp.module.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        and layer.sparse
        and layer.weight.requires_grad
    ]
