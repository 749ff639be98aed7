"""What a balancer is made with, checked at once."""

from __future__ import annotations

from typing import Any

from .._planner import Bounds, Cost
from ..claims import Hybrid
from ..exceptions import invalid
from ..policies import AbstractPolicy, Auto, Equal
from ._data.loaders._eval import Lockstep
from ._exchange._side_group import Alone, SideGroup
from ._options import Runtime


def check_values(bounds: Any, runtime: Any) -> None:
    """Raise unless settings that have a class of their own are of it."""
    for name, value, kind, example in (
        ("bounds", bounds, Bounds, "Bounds(min=2, max=12)"),
        ("runtime", runtime, Runtime, "Runtime(run_dir='runs/mine')"),
    ):
        if not isinstance(value, kind):
            rule, remedy = f"be a `{kind.__name__}`", f"Give `{name}={example}`, or leave it out."
            raise invalid(f"Balancer({name}=...)", rule, repr(value), remedy)


def checked_size(global_batch_size: Any) -> int | None:
    """Return the global batch size, or raise if it is invalid."""
    if global_batch_size is None:
        return None
    if type(global_batch_size) is not int or global_batch_size < 1:
        raise invalid(
            "Balancer(global_batch_size=...)",
            "be an integer >= 1",
            repr(global_batch_size),
            "Leave it out to take the loader's batch size times the number of workers; a policy "
            "goes by its name, `Balancer(policy=...)`.",
        )
    return global_batch_size


def checked_cost(
    cost: Any, *, policy: AbstractPolicy[Any], bounds: Bounds, runtime: Runtime
) -> Cost | None:
    """Return the cost of samples, if the other settings suit it; None if samples are counted.

    Raises:
        ValueError: the cost is invalid, or other settings count samples.
    """
    found = Cost.given(cost)
    if found is None:
        return None
    counting = [
        (not isinstance(policy, Auto | Equal), "policy", policy, 'Use "auto", or "equal".'),
        (bounds != Bounds(), "bounds", bounds, "Limit forwards by `Cost(max_size=...)`."),
    ]
    for counts, name, value, remedy in counting:
        if counts:
            rule = "be left out where samples are assigned by `cost`, as it counts them"
            raise invalid(f"Balancer({name}=...)", rule, value, remedy)
    if isinstance(runtime.claims, Hybrid):
        rule = "be left out with `Balancer(cost=...)`, because claims count samples"
        raise invalid("Runtime(claims=...)", rule, runtime.claims, "Use one of the two.")
    return found


def check_lockstep(lockstep: Lockstep | None, cost: Cost | None) -> None:
    """Raise unless ``lockstep`` is valid and suits ``cost``.

    Raises:
        ValueError: it is invalid, or counts samples while ``cost`` is given.
    """
    if lockstep not in (None, True, False, "steps"):
        raise invalid(
            "Balancer.prepare_eval(lockstep=...)",
            'be a bool or "steps"',
            repr(lockstep),
            "Leave it out, and evenstep finds out.",
        )
    if lockstep == "steps" and cost is not None:
        raise invalid(
            "Balancer.prepare_eval(cost=...)",
            'be left out with `lockstep="steps"`, which counts samples',
            cost,
            "Use `lockstep=True`, or count samples.",
        )


def check_weighed_by_hand(weighting: str | None) -> None:
    """Raise unless the models leave their weight to the loss.

    Raises:
        ValueError: they are weighted at their output, so that a loss would be weighted twice.
    """
    if weighting != "loss":
        raise invalid(
            "Balancer.weight(loss)",
            "be used on models prepared with `weighting='loss'`",
            "one that is weighted at its output already",
            "Prepare it with `prepare(model, loader, weighting='loss')`, or drop this call.",
        )


def check_forwarded(side: SideGroup | Alone | None, *, begun: bool) -> None:
    """Raise for a loss of several ranks in a step that has had no forward of a prepared model.

    Raises:
        ValueError: ``begun``, so there is such a step.
    """
    if begun and side is not None and side.world_size > 1:
        raise invalid(
            "Balancer.weight(loss)",
            "come after a forward of what `prepare` returned, which averages gradients over ranks",
            "a step without one",
            "Call the prepared model itself, `model(x)`, not `model.forward(x)`, `model.module` or "
            "a part of it: give its `forward` an argument that says what to compute.",
        )


def check_weighting(weighting: str, before: str | None) -> None:
    """Raise unless ``weighting`` is valid, and that of the models prepared before.

    Raises:
        ValueError: it is invalid, or differs from the earlier call.
    """
    if weighting not in ("output", "loss"):
        raise invalid(
            "Balancer.prepare(weighting=...)",
            'be "output" or "loss"',
            repr(weighting),
            'Use "output" unless a loss bypasses the model\'s output.',
        )
    if before not in (None, weighting):
        raise invalid(
            "Balancer.prepare(weighting=...)",
            f"be {before!r}, as in the call before",
            repr(weighting),
            "Weight all models of a run in the same way.",
        )
