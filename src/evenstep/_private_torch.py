"""What evenstep relies on of PyTorch that is private there: all of it, and nowhere else.

Each has its reason and, in brackets, the tests that hold it. They run with the pinned version and
with the oldest that ``pyproject.toml`` allows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from operator import attrgetter, call, methodcaller
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm as LocalNorm  # [test_units.py]
from torch.nn.modules.batchnorm import _NormBase as RunningNorm  # [test_units.py]
from torch.nn.parallel import DistributedDataParallel as Ddp

__all__ = ["LocalNorm", "RunningNorm"]

# Where `Module.compile()` keeps what it made; what stands there is called. [test_compiled.py]
IN_PLACE = "_compiled_call_impl"

# How often a tensor was written to: the only way to know whether parameters or a batch have
# changed since. [test_tickets.py, test_patterns.py]
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# Of what a tensor is a view; None where it is none. [test_weighting.py]
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")

# Leaves the counts of tensors as they were: for a change that changes no value. [test_loops.py]
version_kept: Callable[[torch.Tensor], AbstractContextManager[None]] = (
    torch.autograd.grad_mode._unsafe_preserve_version_counter
)

# What identifies a storage, on any device, for as long as it lives. [test_tickets.py]
address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# Has the autograd engine call back when the backward under way is done. From inside a callback as
# well: the engine continues with those added meanwhile. It has been the same since 1.0.
# [test_self_test.py, and every process at its start]
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)

# The engine's number of the backward under way, -1 outside of one: backwards run inside others,
# and nothing public distinguishes them. [test_self_test.py, and every process at its start]
backward_number: Callable[[], int] = torch._C._current_graph_task_id


# Whether the backward under way comes to a node: for one that adds up a gradient, as that of
# `torch.autograd.grad` does not. It raises where it is asked for that gradient. [test_loops.py]
comes_to: Callable[[Any], bool] = torch._C._will_engine_execute_node


def adds_to(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether the backward under way adds to a gradient of ``parameters``."""
    nodes = (get_gradient_edge(one).node for one in parameters if one.requires_grad)
    try:
        return any(map(comes_to, nodes))
    except RuntimeError:  # it is asked for one of these gradients itself
        return False


class NodeHook:
    """Has nodes of the autograd graph call back when a backward reaches them.

    Nodes share the dict of hooks of a tensor of our own, as ``Tensor.register_hook`` has a node
    share its tensor's. ``register_prehook`` makes a dict and a handle anew for each node, which
    takes 0.3 ms after a sleep of 100 ms, when nothing is in the caches. [test_recorder.py]

    Args:
        call: called with a gradient, or with None; returns None.

    Attributes:
        put: has a node call back.
    """

    def __init__(self, call: Callable[[Any], None]) -> None:
        owner = torch.zeros((), requires_grad=True)
        owner.register_hook(call)  # type: ignore[no-untyped-call]
        self.put: Callable[[Any], None] = methodcaller("_register_hook_dict", owner)


class CollectiveCount:
    """Counts the collectives that this process has begun, over all process groups.

    Torch numbers them in each group, to compare ranks. [test_loops.py]

    Args:
        groups: of this process; all of them by default.

    Attributes:
        groups: as given.
        numbers: what returns the number of each, as of the last ``renew``. A step adds them up
            several times, without a call of Python's.
    """

    def __init__(self, groups: Any = None) -> None:
        self.groups: Any = dist.distributed_c10d._world.pg_map if groups is None else groups
        self.numbers: list[Callable[[], int]] = []

    def renew(self) -> None:
        """Learn of the groups that were made or destroyed, as where there are more or fewer."""
        self.numbers[:] = [group._get_sequence_number_for_group for group in self.groups]

    def __call__(self) -> int:
        """Return their number; another one as well where groups were made or destroyed."""
        if len(self.groups) != len(self.numbers):
            self.renew()
        return sum(map(call, self.numbers))


def process_groups() -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of this process that were not destroyed. [test_startup.py]"""
    return tuple(dist.distributed_c10d._world.pg_map)


def backends_of(group: dist.ProcessGroup) -> Iterator[tuple[str, int]]:
    """Yield the name of each of a group's backends, and how many collectives it has begun.

    One that is being destroyed, or does not count, is left out. [test_stops.py]
    """
    made: Any = group
    for device in made._device_types:
        try:
            backend = made._get_backend(device)
            yield backend.name(), backend._get_sequence_number_for_group()
        except RuntimeError:
            continue


def default_store() -> Any:
    """Return the store by which the default group was made: there is none beside it to meet at.

    [test_startup.py]
    """
    return dist.distributed_c10d._get_default_store()


def pinned(batch: Any, device_type: str | None) -> Any:
    """Return ``batch`` in pinned memory, whatever it is: as ``DataLoader`` does.

    [test_stream_mistakes.py]
    """
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch, device_type)  # type: ignore[no-untyped-call]


def comm_hooks_of(ddp: Ddp) -> list[tuple[Any, Any]]:
    """Return DDP's communication hooks and their states: it refuses a second. [test_reducer.py]"""
    hooks: list[tuple[Any, Any]] = ddp._comm_hooks
    return hooks


def original_of(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given; ``module`` itself if it was not.

    [test_compiled.py]
    """
    original = module._modules.get("_orig_mod")
    return module if original is None else original


def call_of(module: nn.Module) -> Callable[..., Any]:
    """Return the call of a module with its hooks, past what is compiled. [test_compiled.py]"""
    return module._call_impl


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return what is called before and after the forwards of a module. [test_loops.py]"""
    return (*module._forward_pre_hooks.values(), *module._forward_hooks.values())


def buffers_of(layer: nn.Module) -> MutableMapping[str, torch.Tensor | None]:
    """Return the layer's own buffers, to put one back that a forward replaced. [test_retries.py]"""
    return layer._buffers


def reduces_in_python(ddp: Ddp) -> bool:
    """Return whether DDP's reduction is compiled into the backward. [test_compiled.py]"""
    return bool(getattr(ddp, "_use_python_reducer", False))


def check_reduced(ddp: Ddp) -> None:
    """Raise DDP's own error if a backward is over and not all it reduces was ready.

    DDP raises it in the next forward. That is too late where a rank waits before for others, which
    wait in this reduction. [test_diverging.py]
    """
    ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]


def meet(ddp: Ddp) -> None:
    """Run the collectives that DDP's next forward would: new buckets, buffers. [test_counts.py]"""
    ddp.reducer._rebuild_buckets()
    if ddp._check_sync_bufs_pre_fwd():  # type: ignore[no-untyped-call]
        ddp._sync_buffers()  # type: ignore[no-untyped-call]
        ddp.require_forward_param_sync = False  # DDP itself sets it after its backward


def fsdp_device(layer: Any) -> torch.device:
    """Return where an FSDP2 layer computes, whatever memory has its shards. [test_fsdp.py]"""
    device: torch.device = layer._get_fsdp_state()._device
    return device


def fsdp_groups(layer: Any) -> list[Any]:
    """Return what an FSDP2 layer gathers and reduces together.

    There is no public way to its mesh. 2.7 has one where later versions
    have a list. [test_fsdp.py]
    """
    state = layer._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def after_forward(layers: list[Any]) -> list[tuple[Any, Any]]:
    """Return what FSDP2 groups do after a forward, to put it back as ``post_forward_mesh_info``.

    The first layer's group does nothing, unless it was set to: FSDP2 settles that in the first
    forward. [test_fsdp.py]
    """
    root = layers[0]._get_fsdp_state()
    is_unset = bool(getattr(root, "_auto_reshard_after_forward", False))
    return [
        (group, None if is_unset and layer is layers[0] else group.post_forward_mesh_info)
        for layer in layers
        for group in fsdp_groups(layer)
    ]


def forget_gradients(layer: Any) -> None:
    """Drop what an FSDP2 layer has accumulated and not reduced. [test_fsdp.py]"""
    for group in fsdp_groups(layer):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def is_whole(layer: Any) -> bool:
    """Return whether an FSDP2 layer has all of a parameter gathered. [test_fsdp.py]"""
    return any(group.is_unsharded for group in fsdp_groups(layer))


# From where FSDP2 calls collectives, and by what names, in all versions. On a CPU the call
# waits, or copying out if it returns `Work`. On a device streams wait: for a gather where
# it is copied out, for a reduction in two methods of a group. [test_fsdp.py]
FSDP2_COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
FSDP2_CALLS = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
)
FSDP2_COPY_OUT = "foreach_all_gather_copy_out"
FSDP2_REDUCED = "_wait_for_post_backward"
FSDP2_POST_BACKWARD = "post_backward"


def wait_for_gather(result: Any, device: torch.device) -> None:
    """Wait for a layer's parameters, as FSDP2 is about to. [test_fsdp.py]"""
    if device.type != "cpu" and result.all_gather_event is not None:
        torch.accelerator.current_stream(device).wait_event(result.all_gather_event)
    if isinstance(result.all_gather_work, dist.Work):
        result.all_gather_work.wait()


def wait_for_reduction(group: Any) -> None:
    """Have the stream wait for the reduction whose memory FSDP2 takes back next. [test_fsdp.py]

    Up to some version there was one at a time.
    """
    shared = group.comm_ctx
    if hasattr(shared, "reduce_scatter_states"):
        states = shared.reduce_scatter_states
        is_full = len(states) >= getattr(shared, "reduce_scatter_max_input_buffers", 1)
        oldest = states[0] if is_full else None
    else:
        oldest = shared.reduce_scatter_state
    if oldest is not None and oldest.event is not None:
        group.device_handle.current_stream().wait_event(oldest.event)


def has_own_collectives(layer: Any) -> bool:
    """Return whether a script gave an FSDP2 layer other collectives than torch's. [test_fsdp.py]"""
    names = ("_all_gather_comm", "_reduce_scatter_comm")
    comms = [getattr(group, name, None) for group in fsdp_groups(layer) for name in names]
    return any(one is not None and not type(one).__module__.startswith("torch.") for one in comms)


def mark_dynamic(tensor: torch.Tensor) -> None:
    """Have no graph of its own compiled for the tensor's number of rows. [test_compiled.py]"""
    torch._dynamo.maybe_mark_dynamic(tensor, 0)


def compile_callbacks() -> Any:
    """Return what is notified of compilations; None before the compiler is imported.

    [test_compiled.py]
    """
    return torch._dynamo.callback.callback_handler if "torch._dynamo" in sys.modules else None


class Compiling(NamedTuple):
    """A compilation under way.

    Attributes:
        code: number of the piece of code.
        num_before: compilations of it so far.
        limit: how many torch allows.
    """

    code: int
    num_before: int
    limit: int


def compiling() -> Compiling | None:
    """Return the compilation under way; None of what torch does not number. [test_compiled.py]"""
    found = torch._guards.CompileContext.current_compile_id()
    if found is None or found.frame_id is None or found.frame_compile_id is None:
        return None
    limit: int = torch._dynamo.config.recompile_limit
    return Compiling(found.frame_id, found.frame_compile_id, limit)


def checkpoint_classes() -> tuple[Any, ...]:
    """Return what torch's index of a checkpoint has beside public classes. [test_checkpoint.py]"""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _StorageInfo, _MEM_FORMAT_ENCODING


# What DDP calls to broadcast its buffers before a forward: others are waited for in it.
# [test_watch_ddp.py]
SYNC_BUFFERS = "_sync_buffers"

# FSDP2's state of a module: where a root's forward begins, and where it ends. [test_watch_fsdp.py]
FSDP2_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
FSDP2_INIT = "init"
FSDP2_ROOT_PRE_FORWARD = "_root_pre_forward"
FSDP2_POST_FORWARD = "_post_forward"

# What it gathers and reduces together, and where it waits for others: on a device that a stream
# works for, gathering itself only asks for it. [test_watch_fsdp.py]
FSDP2_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP2_GATHER = "unshard"
FSDP2_WAITS = ("wait_for_unshard", "post_backward")


def loader_iterators() -> Any:
    """Return the class of what a ``DataLoader`` is read by, in this process and in others.

    [test_watch_ddp.py]
    """
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    return _BaseDataLoaderIter


def dataset_of(iterator: Any) -> Any:
    """Return the data set that such a one reads. [test_watch_ddp.py]"""
    return iterator._dataset


def indices_of(iterator: Any) -> Any:
    """Return what such a one draws indices from: its loader's own. [test_watch_ddp.py]"""
    return iterator._index_sampler


def fsdp2_device(state: Any) -> torch.device:
    """Return where an FSDP2 layer computes, by its state. [test_watch_fsdp.py]"""
    device: torch.device = state._device
    return device


def fsdp2_is_root(state: Any) -> bool:
    """Return whether a forward through the root of this state is running. [test_watch_fsdp.py]"""
    context = state._state_ctx
    return context is not None and context.iter_forward_root is state


# Where `torch.compile` has the class of the modules that it makes. [test_watch_compiled.py]
EVAL_FRAME = "torch._dynamo.eval_frame"
