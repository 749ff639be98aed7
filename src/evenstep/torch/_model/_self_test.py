"""Whether the installed torch behaves, where nothing promises it, as evenstep relies on.

The weight and the clock need the order in which the autograd engine calls back, and a number for
each backward. Both are private to torch. A torch that does otherwise would give wrong gradients or
wrong times without an error, so it is refused before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..._private_torch import IN_PLACE, at_end_of_backward, backward_number
from ..._warning import warn
from ...exceptions import invalid
from ._compiled import ddp_of

_REMEDY = "Install torch 2.13.0, with which evenstep is tested, or set EVENSTEP=off for this run."
_TESTED = (2, 13)
_ORDER = ["output", "inner", "inner end", "gradient", "end", "wait", "after the wait"]


def self_test(model: nn.Module) -> None:
    """Check what evenstep relies on in torch, once per process, and in the DDP of ``model``.

    A newer torch than any that evenstep was tested with is warned of, once per process.

    Raises:
        ValueError: torch behaves in another way; the message says how.
    """
    _check_once()
    ddp = ddp_of(model)
    for name in ("require_forward_param_sync", "require_backward_grad_sync"):
        if ddp is not None and not isinstance(getattr(ddp, name, None), bool):
            raise _refused(f"keep a DDP's `{name}`, on which evenstep relies", "none there")


def warn_if_newer(version: str) -> None:
    """Warn of a torch that is newer than any that evenstep was tested with.

    Args:
        version: as in ``torch.__version__``; one that cannot be read, as of a build from source,
            is let be.
    """
    release = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if release > _TESTED:
        tested = ".".join(map(str, _TESTED))
        warn(
            f"torch {version} is newer than {tested}, the newest that evenstep was tested with. "
            "Hooks and callbacks were tried now, and behave as before. To be sure of the rest, "
            f"compare losses with those of a run under EVENSTEP=off, or install torch {tested}."
        )


def check_engine(
    queue: Callable[[Callable[[], None]], None] = at_end_of_backward,
    task: Callable[[], int] = backward_number,
) -> None:
    """Run a backward of a few nodes, another one inside it, and look at what is called when.

    On the CPU, whatever the default device; random states and the grad mode stay as they are.

    Args:
        queue: has the engine call back at the end of the backward under way.
        task: gives its number.

    Raises:
        ValueError: callbacks come in another order, or backwards cannot be distinguished.
    """
    seen: list[tuple[str, int]] = []
    try:
        before = task()
        with torch.inference_mode(False), torch.enable_grad():
            _run(seen, queue, task)
        after = task()
    except Exception as error:
        what = "call back at the end of a backward, and number backwards"
        raise _refused(what, f"{type(error).__name__}: {error}") from error
    calls = [name for name, _ in seen]
    if calls != _ORDER:
        raise _refused(f"call back in the order {_ORDER}", calls)
    outer, inner, again = (dict(seen)[name] for name in ("output", "inner", "gradient"))
    if not (before == after == -1 and outer == again >= 0 and inner >= 0 and inner != outer):
        got = f"{before}, {outer}, {inner}, {again}, {after}"
        raise _refused("number backwards, -1 outside of them and another one inside", got)


class _Note(torch.autograd.Function):
    """An identity whose backward takes a note."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.note()
        return grads[0], None


def _run(
    seen: list[tuple[str, int]],
    queue: Callable[[Callable[[], None]], None],
    task: Callable[[], int],
) -> None:
    """Note the callbacks of an output, as evenstep asks for them, and of a gradient, as DDP does.

    Between them lies a backward inside of the backward, as in reentrant checkpointing.
    """

    def at(name: str, later: Callable[[], None] | None = None) -> Callable[[], None]:
        """Return what notes that it is called, and asks for ``later`` at the backward's end."""

        def note() -> None:
            seen.append((name, task()))
            if later is not None:
                queue(later)

        return note

    def nested() -> None:
        with torch.enable_grad():
            leaf = torch.ones((), device="cpu", requires_grad=True)
            note = at("inner", at("inner end"))
            torch.autograd.backward(_Note.apply(leaf, note))  # type: ignore[no-untyped-call]

    parameter = torch.ones((), device="cpu", requires_grad=True)
    gradient = at("gradient", at("wait"))
    parameter.register_post_accumulate_grad_hook(lambda _: gradient())  # type: ignore[no-untyped-call]
    hidden = _Note.apply(parameter, nested)  # type: ignore[no-untyped-call]
    note = at("output", at("end", at("after the wait")))
    torch.autograd.backward(_Note.apply(hidden, note))  # type: ignore[no-untyped-call]


def check_call(place: str = IN_PLACE) -> None:
    """Look whether a module calls what ``Module.compile()`` puts in its ``place``.

    Raises:
        ValueError: it calls its own ``forward``.
    """
    module = nn.Identity()
    module.__dict__[place] = lambda value: "placed"
    if (got := module("forward")) != "placed":
        raise _refused(f"call what stands in a module's `{place}`", f"its {got}")


@functools.cache
def _check_once() -> None:
    check_engine()
    check_call()
    warn_if_newer(torch.__version__)


def _refused(rule: str, got: object) -> ValueError:
    return invalid(f"torch {torch.__version__}", rule, got, _REMEDY)
