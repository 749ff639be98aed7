"""What a run has learnt about its workers, carried over to other ranks, more or fewer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._types import Cluster, Decision, FloatArray, IntArray, StepTimings
from ..policies import AbstractPolicy
from ..prediction._affine_filter import AffineFilter
from ..timemodels._curves import AffineTime
from ..timemodels._memory_model import MemoryModel

Learnt = dict[str, Any]
"""Of a planner: nested dicts and tuples of arrays, numbers, strings and None."""

BY_COST = "by cost"  # in the place of a policy, where samples were assigned so

_SHOWN = 30  # steps at most; rules that move a few samples at a time get no further than that
_CALM = 5  # steps without a change after which nothing more is to come


def places(before: Sequence[str], now: Sequence[str]) -> IntArray:
    """Return where in ``before`` each worker of ``now`` is found, -1 if nowhere.

    Several workers may have one name, as the CPU ranks of a host do: they are distinguished by
    their order alone.
    """
    free: dict[str, list[int]] = {}
    for index, name in enumerate(before):
        free.setdefault(name, []).append(index)
    found = [free[name].pop(0) if free.get(name) else -1 for name in now]
    return np.array(found, np.int64)


def columns(state: Any, fresh: Any, former: IntArray, *, axis: int = -1) -> Any:
    """Return ``fresh`` with what ``state`` has of the workers that are known.

    Args:
        state: nested dicts and tuples of arrays, and of numbers.
        fresh: the same for the workers of now.
        former: where each worker was then, -1 for one that is new.
        axis: along which the arrays have the workers.
    """
    if isinstance(fresh, dict):
        return {name: columns(state[name], fresh[name], former, axis=axis) for name in fresh}
    if isinstance(fresh, tuple):
        return tuple(columns(*pair, former, axis=axis) for pair in zip(state, fresh, strict=True))
    if not isinstance(fresh, np.ndarray):
        return state
    known, taken = former >= 0, np.moveaxis(fresh.copy(), axis, 0)
    taken[known] = np.moveaxis(state, axis, 0)[former[known]]
    return np.moveaxis(taken, 0, axis)


def check_learnt(learnt: Learnt, workers: Sequence[str]) -> None:
    """Raise unless a planner of these workers may have said so, whatever it was read from.

    Of its own state only the policy knows what is right, infinities included: it is tried before a
    run continues from it.

    Raises:
        ValueError: it cannot be.
    """
    template = {
        "policy": "",
        "global_batch_size": 0,
        "batch_size": np.zeros(len(workers), np.int64),
        "times": AffineFilter().init(len(workers)),
        "memory": MemoryModel().init(len(workers)),
    }
    foreseen = {name: value for name, value in learnt.items() if name != "policy_state"}
    if not workers or "policy_state" not in learnt or not alike(foreseen, template):
        raise ValueError("these are no estimates of such workers")


def alike(state: Any, template: Any) -> bool:
    """Return whether ``state`` has the keys, shapes and kinds of ``template``, all of it finite."""
    if type(state) is not type(template):
        return False
    if isinstance(template, dict):
        return state.keys() == template.keys() and all(
            alike(state[name], template[name]) for name in template
        )
    if isinstance(template, tuple):
        return len(state) == len(template) and all(map(alike, state, template))
    if isinstance(template, np.ndarray):
        fits = state.shape == template.shape and state.dtype == template.dtype
        return fits and bool(np.isfinite(state).all())
    return not isinstance(template, float) or bool(np.isfinite(state))


Known = tuple[AffineTime, FloatArray]
"""Every worker's time, and the relative noise of a step, ``(world_size,)``."""


def rehearse(policy: AbstractPolicy[Any], cluster: Cluster, known: Known) -> Decision[Any]:
    r"""Return what a policy decides after being shown steps that were not run.

    Step $k$ takes $t_r(b_r) (1 \pm \nu_r)$ of worker $r$, with the sign changing from step to
    step and from worker to worker, so that a policy which learns how noisy workers are is not
    taught that they are exact. So any policy can start from the times of workers it has never
    seen at these ranks, whatever its state looks like.
    """
    decision, calm = policy.init(cluster), 0
    with np.errstate(all="raise", under="ignore"):  # what underflows is 0
        for step in range(_SHOWN):
            sizes = decision.batch_size
            timings = foreseen(known, sizes, sign=(-1) ** step)
            decision = policy.update(cluster, timings, decision.state)
            calm = calm + 1 if np.array_equal(decision.batch_size, sizes) else 0
            if calm == _CALM:
                break
    return decision


def foreseen(known: Known, sizes: IntArray, *, sign: int = 0) -> StepTimings:
    """Return the timings of a step that goes as foreseen, or off by the noise."""
    times, noise = known
    workers = np.arange(len(sizes))
    off = sign * np.where(workers % 2, -1.0, 1.0) * np.minimum(noise, 0.5)
    return StepTimings(sizes, times.seconds(sizes) * (1 + off), data_s=np.zeros(len(workers)))
