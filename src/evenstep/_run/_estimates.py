"""What a balancer has learnt, as a checkpoint holds it: plain values, by worker."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._planner import AbstractPlanner, Learnt, check_learnt, places
from .._warning import warn
from ..events import EstimatesRestored
from ..exceptions import invalid


def encode(state: Any, where: str = "state") -> Any:
    """Return ``state`` as lists, dicts, numbers, strings and None, or name what does not fit.

    Types count exactly. A named tuple, an enum or a numpy scalar passes for its base class, but
    reading it back takes its own class, which ``weights_only=True`` does not load.
    """
    if state is None or type(state) in (bool, int, float, str):
        return state
    if type(state) is tuple:
        return ["tuple", *(encode(item, f"{where}[{i}]") for i, item in enumerate(state))]
    if type(state) is dict and all(type(key) is str for key in state):
        return {key: encode(value, f"{where}[{key!r}]") for key, value in state.items()}
    if type(state) is np.ndarray and state.dtype.kind in "biuf":
        return ["array", state.dtype.str, list(state.shape), state.ravel().tolist()]
    raise invalid(
        "Decision(state=...)",
        "hold tuples and dicts (string keys) of arrays, numbers, strings and None only",
        f"{state!r} at {where}",
        "Convert it, or derive it anew in `update`.",
    )


def decode(written: Any) -> Any:
    """Return what ``encode`` was given, in new arrays.

    Raises:
        ValueError: ``encode`` did not write that.
    """
    if written is None or type(written) in (bool, int, float, str):
        return written
    match written:
        case ["tuple", *items]:
            return tuple(decode(item) for item in items)
        case ["array", str(dtype), shape, values] if np.dtype(dtype).kind in "biuf":
            return np.array(values, dtype).reshape(shape)
        case dict():
            return {key: decode(value) for key, value in written.items()}
    raise ValueError(f"{written!r} is no written state")


_FORMAT = "evenstep-balancer-2"
_PACKED = "estimates"


class Estimates:
    """Speed estimates and peaks that follow host and device, not the rank.

    Attributes:
        workers: who each column is about: host and device, by the ranks of then.
        learnt: what a planner said; None where nothing was learnt.
    """

    def __init__(
        self,
        workers: Sequence[str] = (),
        learnt: Learnt | None = None,
    ) -> None:
        self.workers = tuple(workers)
        self.learnt = learnt

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as dicts, lists, numbers and strings: any format of files holds them.

        A policy whose state cannot be written so starts from the speeds alone, with a warning.
        """
        if self.learnt is None:
            return {"format": _FORMAT, "workers": [], "learnt": None}
        learnt = self.learnt
        try:
            written = encode(learnt)
        except ValueError as error:
            warn(
                f"The state of the policy {learnt['policy']} is not saved: {error} After a "
                f"restart it starts from the workers' speeds."
            )
            written = encode({**learnt, "policy": "", "policy_state": None})
        return {"format": _FORMAT, "workers": list(self.workers), "learnt": written}

    def packed(self) -> dict[str, str]:
        """Return it as one text, under the name that it has before anything is learnt too.

        ``torch.distributed.checkpoint`` loads only the names that the loading run has already.
        """
        return {_PACKED: json.dumps(self.state_dict())}

    @classmethod
    def read(cls, state: Any) -> Estimates:
        """Return what ``state_dict`` or ``packed`` wrote.

        Raises:
            ValueError: it is something else, or broken.
        """
        try:
            if _PACKED in state:
                state = json.loads(state[_PACKED])
            if state["format"] != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            if state["learnt"] is None:
                return cls()
            workers, learnt = state["workers"], decode(state["learnt"])
            if not all(type(worker) is str for worker in workers):
                raise TypeError("workers are called by strings")
            check_learnt(learnt, workers)
        except Exception as error:  # what is no state fails in every way there is
            raise invalid(
                "Balancer.load_state_dict(state=...)",
                "come from `Balancer.state_dict()`",
                reprlib.repr(state)[:80],
                "Load the part of the checkpoint that holds the balancer's state, or leave this "
                "call out: the speeds are measured again within a few steps.",
            ) from error
        return cls(workers, learnt)

    def apply(self, planner: AbstractPlanner, workers: Sequence[str]) -> EstimatesRestored | None:
        """Have ``planner`` continue from them, for the workers of now; None if there are none."""
        if self.learnt is None:
            return None
        event = planner.restore(self.learnt, places(self.workers, workers))
        if event.problem and event.policy == "anew":
            warn(
                f"The policy starts anew, since it failed on what was known of the workers "
                f"({event.problem}). It measures their speeds again within some steps."
            )
        return event
