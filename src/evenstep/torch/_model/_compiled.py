"""Models under ``torch.compile``: how to recognise them and keep the balancer's hooks outside.

Whatever of ours runs at a forward (the weight, the clock, the marks on inputs) runs outside of what
is compiled: traced, it would split graphs and leave guards on what changes at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..._private_torch import IN_PLACE, call_of, hooks_of, original_of, reduces_in_python
from ...exceptions import invalid

_BEHIND, _HOOKS = "_evenstep_behind", "_evenstep_hooks"  # what ours stands around, and its hooks

_REASON = (
    "evenstep's hooks run outside of graphs. Compile before `prepare`, not what it returned: "
    "`balancer.prepare(torch.compile(model), loader)`."
)

Before = Callable[[nn.Module, Any, Any], Any]
After = Callable[[nn.Module, Any, Any, Any], Any]


def ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP that ``module`` is, compiled or not; None if it is none."""
    inner = original_of(module)
    return inner if isinstance(inner, DistributedDataParallel) else None


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` as a whole is compiled."""
    call = module.__dict__.get(IN_PLACE)  # by `module.compile()`, or ours around that
    return original_of(module) is not module or getattr(call, _BEHIND, call) is not None


def compiled_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules in ``module`` that are compiled, itself included."""
    if is_compiled(module):
        yield module
        return
    for child in module.children():
        yield from compiled_parts(child)


def check_compiled(module: nn.Module) -> None:
    """Raise if ``module`` is compiled in a way that leaves no clean time or no exact weight.

    Raises:
        ValueError: a DDP with a static graph inside of what is compiled, or one whose reduction
            is compiled into the backward.
    """
    ddp = ddp_of(module)
    if ddp is not None and ddp.static_graph and is_compiled(module):
        raise invalid(
            "Balancer.prepare(model)",
            "be `DDP(torch.compile(model), static_graph=True)`, or do without a static graph",
            "`torch.compile(DDP(model, static_graph=True))`, where waiting for other ranks "
            "cannot be separated from this rank's own time",
            "Compile the model inside of DDP, or leave out `static_graph`.",
        )
    if ddp is not None and reduces_in_python(ddp):
        raise invalid(
            "Balancer.prepare(model)",
            "be a DDP that reduces gradients by itself",
            'one made under `torch._dynamo.config.optimize_ddp = "python_reducer"`, which '
            "compiles the reduction into the backward",
            "Leave the setting at True, torch's default, when making the DDP.",
        )


def hooks_on(module: nn.Module) -> Iterator[Any]:
    """Yield the balancer's hooks on ``module``, wherever they are placed."""
    placed = getattr(module.__dict__.get(IN_PLACE), _HOOKS, ())
    for group in (*hooks_of(module), *placed):
        if isinstance(group, UncompiledHook):
            yield from group.hooks


def inert(*_: Any) -> None:
    """Do nothing: what is left of hooks in a copy or a pickle of the model."""


class UncompiledHook:
    """Hooks that compilers leave alone; in a copy or a pickle of the model nothing is left of them.

    One object for all of a place: torch takes as long to come to a hook as most of them run.

    Args:
        hooks: called one after the other.
        run: calls them with what a hook is given.

    Attributes:
        hooks: as given.
        call: calls them, untraced.
    """

    def __init__(self, hooks: Sequence[Callable[..., Any]], run: Callable[..., Any]) -> None:
        self.hooks = tuple(hooks)
        self._run = self.hooks[0] if len(self.hooks) == 1 else partial(run, self.hooks)
        self.call = torch.compiler.disable(self._called, reason=_REASON)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (inert,)

    def __call__(self, *args: Any) -> Any:
        """Call the hooks, untraced."""
        # Around a compiler that is not there, the way takes longer than the hooks.
        return self.call(*args) if torch.compiler.is_compiling() else self._run(*args)

    def _called(self, *args: Any) -> Any:
        return self._run(*args)


def _before(hooks: Sequence[Callable[..., Any]], module: nn.Module, *given: Any) -> Any:
    """Call hooks of a forward's beginning, which may answer with other inputs and keywords."""
    changed = None
    for hook in hooks:
        answer = hook(module, *given)
        if answer is not None:
            changed = given = answer
    return changed


def _after(hooks: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """Call hooks of a forward's end, each of which gets the answer of the one before."""
    *known, output = args
    for hook in hooks:
        output = hook(*known, output)
    return output


class OuterHooks:
    """What is called before and after a module's forward, outside of what is compiled of it.

    Forward hooks serve where the module is not compiled, and on what ``torch.compile(model)``
    returns, whose own call is not. After ``model.compile()`` hooks are part of the graph; then,
    and for a module inside of a compiled one, the calls stand around the compiled call instead.

    Args:
        module: the module.
        first: called with module, arguments and keywords before every forward, and before all
            other hooks, the user's included. Each returns None, or the inputs and keywords to
            continue with.
        before: likewise, after the user's.
        after: called with the output too after every forward; its answer is taken.

    Attributes:
        module: as given.
        call: what stands around its compiled call; None where hooks serve.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        first: Sequence[Before] = (),
        before: Sequence[Before] = (),
        after: Sequence[After] = (),
    ) -> None:
        self.module = module
        self._first, self._before, self._after = first, before, after
        self._handles: list[RemovableHandle] = []
        self.call: Any = None

    def place(self, *, traced: bool = False) -> None:
        """Put the calls where they belong now; repeated, as a model may be compiled late.

        Args:
            traced: whether the module is called from inside of a compiled one.
        """
        present = self.module.__dict__.get(IN_PLACE)
        if present is not None and present is self.call:
            return
        if present is None and not traced:
            if not self._handles:
                self._register()
            return
        self._take_off()
        before = UncompiledHook((*self._first, *self._before), _before)
        self.call = _around(self.module, present, before, UncompiledHook(self._after, _after))
        self.module.__dict__[IN_PLACE] = self.call

    def release(self) -> None:
        """Leave the module as it was."""
        self._take_off()
        if self.call is not None and self.module.__dict__.get(IN_PLACE) is self.call:
            if (present := getattr(self.call, _BEHIND)) is None:
                del self.module.__dict__[IN_PLACE]
            else:
                self.module.__dict__[IN_PLACE] = present
        self.call = None

    def _register(self) -> None:
        before, after = self.module.register_forward_pre_hook, self.module.register_forward_hook
        if self._first:
            self._handles.append(
                before(UncompiledHook(self._first, _before), prepend=True, with_kwargs=True)
            )
        if self._before:
            self._handles.append(before(UncompiledHook(self._before, _before), with_kwargs=True))
        if self._after:
            self._handles.append(after(UncompiledHook(self._after, _after), with_kwargs=True))

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _around(
    module: nn.Module,
    present: Callable[..., Any] | None,
    before: UncompiledHook,
    after: UncompiledHook,
) -> Callable[..., Any]:
    """Return a call of ``module`` with ours around it, which compilers step over."""

    def call(*args: Any, **keywords: Any) -> Any:
        args, keywords = before.call(module, args, keywords) or (args, keywords)
        output = (present or call_of(module))(*args, **keywords)
        return after.call(module, args, keywords, output)

    # This frame alone is stepped over: what it calls is compiled as if it were not there.
    stepped_over = torch.compiler.disable(call, recursive=False)  # type: ignore[no-untyped-call]
    setattr(stepped_over, _BEHIND, present)
    setattr(stepped_over, _HOOKS, (before, after))
    return stepped_over  # type: ignore[no-any-return]
