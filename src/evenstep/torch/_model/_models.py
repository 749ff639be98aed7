"""What is asked of a model before it is balanced, its hooks, and the models of a run together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle, unserializable_hook

from ..._private_torch import (
    LocalNorm,
    backward_number,
    comes_to,
    fsdp_device,
    original_of,
    version_of,
)
from ..._warning import OneWarning, warn
from ...exceptions import invalid
from .._data._protocols import ANEW
from .._step._reductions import ForwardRecord
from .._step._reporter import CompileWatch
from .._step._tracker import StepTracker
from ._compiled import OuterHooks, check_compiled, compiled_parts, ddp_of, hooks_on, is_compiled
from ._sample_draws import SampleDraws, check_draws
from ._sharded import (
    Shards,
    check_engine,
    check_fsdp,
    check_ranks,
    fsdp_layers,
    is_engine,
    is_fsdp,
    refuse_other_kinds,
)
from ._weighting import Backward, ForwardHook


class NestedBackwards:
    """Finds out whether a model nests backwards, and if so notes when each gradient is ready.

    With reentrant activation checkpointing, DDP's last bucket becomes ready in an inner backward
    and is waited for at that one's end. So the callback at the end of the outer backward comes
    after the wait: 0.155 s were read for a true 0.001. When the last parameter gets its gradient,
    the wait has not begun.

    A hook on every parameter costs time, so they go after a look in which the engine ran no
    backward inside another.

    Args:
        module: the model.
        backward: knows which backward is the outer one.
        steps: have a meter while one is under way.

    Attributes:
        found: whether backwards were nested so far.
    """

    def __init__(self, module: nn.Module, backward: Backward, steps: StepTracker) -> None:
        self._module = module
        self._backward = backward
        self._steps = steps
        self._handles: list[Any] = []
        self.found = False

    def begin(self) -> None:
        """Put the hooks on."""
        if not self._handles:
            self._handles = [
                parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
                for parameter in self._module.parameters()
                if parameter.requires_grad
            ]

    def end(self) -> None:
        """Take them off if there was nothing to find."""
        if not self.found:
            self.release()

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _ready(self, parameter: torch.Tensor) -> None:
        outer = self._backward.task
        if outer is None:
            return
        self.found |= outer != backward_number()
        if self.found and (recorder := self._steps.open_recorder) is not None:
            recorder.grad_ready()


_MESSAGE = (
    "A second backward has come after one forward of a model in DDP, which averages gradients over "
    "ranks in the first one alone: what the second adds differs from rank to rank, in plain DDP "
    "too. Add the losses up, and call `backward` once, or make a forward for each backward."
)


def watch_second_backward(
    ddp: DistributedDataParallel, backward: Backward, hook: ForwardHook
) -> RemovableHandle:
    """Look at one parameter of a model in every backward, until the hook is removed.

    Warns once of a backward after which ranks have gradients of their own. A backward that does
    not add to the parameter's gradient counts as none, as one of `torch.autograd.grad`.

    A backward of zeros past the output, as of ``sum(p.sum() for p in model.parameters()) * 0`` in
    place of a loss, is noted for the batch of the forward: DDP has averaged in it.

    Args:
        ddp: the model. Its newest forward sets whether a backward is to be reduced.
        backward: knows the backward under way.
        hook: knows the forwards whose backward DDP waits for.
    """
    warn, awaited = OneWarning(), hook.awaited
    nobodys = torch.ones(1, requires_grad=True)  # where nothing is trained
    looked_at = next((p for p in ddp.parameters() if p.requires_grad), nobodys)
    node = get_gradient_edge(looked_at).node
    spent: ForwardRecord | None = None
    newest: int | None = None

    def ready(gradient: torch.Tensor) -> None:
        nonlocal spent, newest
        task = backward.task
        if task is None:
            uses = [use for use in awaited if use.reduces]
            if uses and not gradient.any():  # else of what all ranks share, as a decay
                for use in uses:
                    backward.entered(use)
        elif task != newest and ddp.require_forward_param_sync and awaited:
            with suppress(RuntimeError):  # as it is asked for this very gradient
                if comes_to(node):
                    if awaited[-1] is spent:
                        warn(_MESSAGE)
                    spent, newest = awaited[-1], task

    return looked_at.register_hook(unserializable_hook(ready))  # type: ignore[no-untyped-call, no-any-return]


Weighting = Literal["output", "loss"]


class BalancedModel:
    """A user's model with the balancer's hooks on it; the model object stays the user's own.

    Args:
        module: the model; wrapped into DDP by the caller where it was plain.
        backward: is notified of every backward.
        steps: know to which batch a forward belongs.
        watch: marks what compiled models are given.
        number: the model's, in the order of ``prepare``.
        weighs: whether what the model returns is scaled; ``Balancer.weight`` does it otherwise.
        draws_by_sample: whether dropout draws by sample.

    Attributes:
        module: as given.
        ddp: that it is, compiled or not; None if it is none.
        shards: its layers if FSDP2 shards it.
        surrounds: its hooks, and those of its parts.
        weighs: as given.
        hook: at every forward.
        nested: finds backwards inside others; None where that is of no matter.
        broadcasts: whether DDP has broadcast its buffers since this was last cleared; one entry
            says it.
    """

    def __init__(
        self,
        module: nn.Module,
        backward: Backward,
        steps: StepTracker,
        watch: CompileWatch,
        *,
        number: int,
        weighs: bool,
        draws_by_sample: bool = False,
    ) -> None:
        self.module = module
        self.ddp = ddp_of(module)
        self.shards = Shards(layers) if (layers := fsdp_layers(module)) else None
        self.broadcasts: deque[None] = deque(maxlen=1)
        self.weighs = weighs
        self._steps = steps
        self._entered: Any = None  # the mark at DDP's entry
        compiled = is_compiled(module)
        hook = self.hook = ForwardHook(
            steps, backward, None if compiled else watch, model=number, weighs=weighs, ddp=self.ddp
        )
        # DDP's broadcast of buffers waits for rank 0: it is kept out of the compute time.
        timed = self.ddp.module if self.ddp is not None and _broadcasts(self.ddp) else None
        outer = OuterHooks(
            module,
            first=[
                hook.before,
                *([] if timed is None else [self._enter_broadcast]),
                *([] if self.shards is None else [self.shards.enter]),
            ],
            before=[watch.mark] if compiled else [],
            after=[hook, *([] if self.shards is None else [self.shards.leave])],
        )
        parts = [part for part in compiled_parts(module) if part is not module]
        others = [OuterHooks(one, before=[watch.mark]) for one in parts if one is not timed]
        self.surrounds = [outer, *others]
        self._inner: OuterHooks | None = None
        if timed is not None:
            marks = [watch.mark] if any(part is timed for part in parts) else []
            self._inner = OuterHooks(timed, first=[self._leave_broadcast], before=marks)
            self.surrounds.append(self._inner)
        self._releases = [one.release for one in self.surrounds]
        watch.marks |= compiled
        self._has_parts = bool(parts)
        watch.has_parts |= self._has_parts
        # Not for FSDP2, whose time ends before the last backward, nor for compiled modules.
        self.nested: NestedBackwards | None = None
        if self.ddp is not None and self.shards is None and not self.compiles:
            self.nested = NestedBackwards(self.ddp.module, backward, steps)
            second = watch_second_backward(self.ddp, backward, hook)
            self._releases += [self.nested.release, second.remove]
        self._draws_by_sample = draws_by_sample
        if draws_by_sample:
            self._releases.append(SampleDraws(module, hook).release)
        self.place()

    def place(self) -> None:
        """Put the hooks where they belong: a model may be compiled after it was prepared."""
        if self.ddp is not None and self.ddp.static_graph:
            check_compiled(self.module)
        if self._draws_by_sample:
            check_draws(self.module, compiles=self.compiles)
        for one in self.surrounds:
            one.place(traced=one is self._inner and is_compiled(self.module))

    @property
    def compiles(self) -> bool:
        """Whether the model, or a part of it, is compiled."""
        return self._has_parts or is_compiled(self.module)

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether DDP hands rank 0's buffers to all ranks at each forward."""
        return self.ddp is not None and self.ddp.broadcast_buffers

    def release(self) -> None:
        """Take the hooks off: the model is a plain one again, and nothing keeps it alive."""
        for release in self._releases:
            release()
        if self.shards is not None:
            self.shards.give_up()

    def no_sync(self) -> AbstractContextManager[Any] | None:
        """Return a context in which a backward does not synchronise; None for plain modules."""
        if self.shards is not None:
            return self.shards.no_sync()
        return None if self.ddp is None else self.ddp.no_sync()

    def _enter_broadcast(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        recorder = self._steps.open_recorder
        self._steps.collective(entered=True)
        self._entered = None if recorder is None else recorder.clock.mark()

    def _leave_broadcast(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        recorder, begin = self._steps.open_recorder, self._entered
        self._steps.collective(entered=False)
        self.broadcasts.append(None)
        self._entered = None
        if recorder is not None and begin is not None:  # not if the inner one is called by itself
            recorder.exclude(begin, recorder.clock.mark())


def _broadcasts(ddp: DistributedDataParallel) -> bool:
    return bool(ddp.broadcast_buffers) and any(True for _ in ddp.module.buffers())


def forward_is_collective(modules: Iterable[nn.Module]) -> bool:
    """Return whether a forward of any of ``modules`` is a collective, in an evaluation too.

    FSDP gathers parameters in every forward. DDP broadcasts buffers in a forward that follows one
    with gradients: the first of an evaluation under ``torch.no_grad()``, and all without it.
    """
    return any(
        is_fsdp(module) if (ddp := ddp_of(module)) is None else _broadcasts(ddp)
        for module in modules
    )


def check_unprepared(module: nn.Module) -> None:
    """Raise if ``module``, or the model inside a DDP, carries the hooks already."""
    ddp = ddp_of(module)
    for layer in (module, original_of(module), module if ddp is None else ddp.module):
        if any(isinstance(hook, ForwardHook) for hook in hooks_on(layer)):
            raise invalid(
                "Balancer.prepare(model)",
                "be given each model once",
                f"{type(module).__name__} a second time, whose gradient would be weighted twice",
                f"Keep the model that the first call returned. For new data: {ANEW}",
            )


def with_ddp(
    module: nn.Module, world_size: int, process_group: torch.distributed.ProcessGroup | None
) -> nn.Module:
    """Return ``module`` as it is if it averages gradients or is alone, else in a DDP."""
    device = device_of(module)  # or there is nothing to train
    if is_engine(module):
        check_engine(module, process_group)
        return module
    if world_size > 1:
        refuse_other_kinds(module)
        _refuse_ddp_inside(module)
    if fsdp_layers(module):
        check_fsdp(module, process_group)
        return module
    if (ddp := ddp_of(module)) is not None:
        check_ranks(
            torch.distributed.get_process_group_ranks(ddp.process_group),
            process_group,
            "a DDP over",
            "Give the same group to `Runtime(process_group=...)`, or, with servers, wrap it into "
            "`DDP(model, process_group=balancer.workers)`.",
        )
        return module
    if world_size == 1:
        return module
    ids = [device.index] if device.type == "cuda" and device.index is not None else None
    return DistributedDataParallel(module, device_ids=ids, process_group=process_group)


def _refuse_ddp_inside(module: nn.Module) -> None:
    """Raise if a part of ``module`` averages gradients for itself: they would be averaged twice."""
    outer = ddp_of(module)
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel) and part is not outer:
            raise invalid(
                "Balancer.prepare(model)",
                "be a DDP as a whole, or have none inside",
                f"{type(module).__name__} with a DDP at `{name}`",
                f"Prepare that one: `balancer.prepare(model.{name}, loader)`. What is around it "
                "stays as it is.",
            )


def device_of(module: nn.Module) -> torch.device:
    """Return where ``module`` computes; a model without parameters has nothing to train."""
    if layers := fsdp_layers(module):
        return fsdp_device(layers[0])  # whatever memory it keeps its shards in
    for parameter in module.parameters():
        return parameter.device
    raise invalid(
        "Balancer.prepare(model)",
        "have parameters",
        f"{type(module).__name__} without any",
        "Prepare the model that is trained.",
    )


def has_local_batch_norm(module: nn.Module) -> bool:
    """Return whether a layer normalises over the rank's own samples alone."""
    return any(
        isinstance(layer, LocalNorm) and not isinstance(layer, nn.SyncBatchNorm)
        for layer in module.modules()
    )


def warn_batch_norm(module: nn.Module) -> None:
    """Say what no weight can repair, and the remedy on this device."""
    if not has_local_batch_norm(module):
        return
    remedy = (
        "Convert it with `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before DDP"
        if device_of(module).type == "cuda"
        else "Use GroupNorm instead: SyncBatchNorm does not run on a CPU"
    )
    warn(
        f"{type(module).__name__} has local BatchNorm, which normalizes each rank's samples "
        f"separately: with uneven batches the result differs from the equal split, and no weight "
        f"repairs that. {remedy}. Until then, every rank gets at least 2 samples, and "
        f"`balancer.average_buffers()` makes one set of running statistics for evaluation."
    )


class PreparedModels(list[BalancedModel]):
    """All models that a balancer has prepared, in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self._through = False
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have the backwards inside accumulate gradients without synchronising them."""
        with ExitStack() as stack:
            for model in self:
                if (context := model.no_sync()) is not None:
                    stack.enter_context(context)
            yield

    def modules(self) -> list[nn.Module]:
        """Return the modules themselves."""
        return [model.module for model in self]

    def version(self) -> int:
        """Return a number that differs where an optimizer has changed a model's parameters."""
        firsts = (next((p for p in m.module.parameters() if p.requires_grad), None) for m in self)
        return sum(version_of(first) for first in firsts if first is not None)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all of them."""
        return [parameter for model in self for parameter in model.module.parameters()]

    @property
    def can_run_again(self) -> bool:
        """Whether one rank may repeat a forward that broke off, without the others.

        Not where forwards are collectives, as in FSDP2 and DeepSpeed's engine.
        """
        return all(model.shards is None and not is_engine(model.module) for model in self)

    @property
    def synchronise(self) -> bool:
        """Whether any of them is in a DDP, whose last backward of a step synchronises."""
        return any(model.ddp is not None for model in self)

    def expect_forward(self) -> None:
        """Note that a forward comes next, which may break off."""
        self.end_forward()
        self._through = False
        for model in self:
            model.broadcasts.clear()
            if model.ddp is not None and not model.compiles:
                self._hooks.append(model.module.register_forward_hook(self._note))

    def end_forward(self) -> None:
        """Note that it has not broken off, and that its backward is over too."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note(self, *_: Any) -> None:
        self._through = True

    @property
    def expects_reduction(self) -> bool:
        """Whether a DDP's forward is through, which may have set the reducer on its backward.

        DDP offers no way back from there that would not rebuild its buckets, on this rank alone.
        """
        if any(model.ddp is not None and model.compiles for model in self):
            return True  # a hook would be compiled along, so that is unknown
        return self._through

    def forget_forward(self) -> None:
        """Undo what a forward that broke off has left in DDP.

        If it came as far as the broadcast of buffers, the next one would broadcast them once more,
        on this rank alone. The attribute is DDP's own; a test holds it for the pinned version.
        """
        self.end_forward()
        for model in self:
            if model.ddp is not None and model.broadcasts:
                model.ddp.require_forward_param_sync = False
