"""What a balancer keeps for a restart, as plain values and as a text."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from .._planner import Learnt, Planner, check_learnt, places
from ..events import EstimatesRestored
from ..exceptions import invalid
from ._dataset import EpochForm, Position

FORMAT = "evenstep-tensorflow-1"


class Kept:
    """Where the data is, and what was learnt about the workers, by host.

    Args:
        position: where an interrupted run goes on.
        num_steps: steps done in the run.
        workers: hosts, by the ranks of then.
        learnt: what the planner said; None where nothing was learnt.
        form: of the epochs that the position is in; None before there was data.
    """

    def __init__(
        self,
        position: Position,
        num_steps: int,
        workers: Sequence[str] = (),
        learnt: Learnt | None = None,
        form: EpochForm | None = None,
    ) -> None:
        self.position = position
        self.num_steps = num_steps
        self.workers = tuple(workers)
        self.learnt = learnt
        self.form = form

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as nested dicts of plain values and arrays."""
        return {
            "format": FORMAT,
            "epoch": self.position.epoch,
            "step": self.position.step,
            "num_steps": self.num_steps,
            "form": None if self.form is None else asdict(self.form),
            "workers": list(self.workers) if self.learnt is not None else [],
            "learnt": None if self.learnt is None else dict(self.learnt),
        }

    @classmethod
    def read(cls, state: Any) -> Kept:
        """Return what ``state_dict`` wrote.

        Raises:
            ValueError: it is something else, or broken.
        """
        try:
            return cls._read(state)
        except Exception as error:  # what is no state fails in every way there is
            raise invalid(
                "Balancer.load_state_dict(state=...)",
                "come from `Balancer.state_dict()`",
                reprlib.repr(state)[:80],
                "Load the part of the checkpoint that holds the balancer's state.",
            ) from error

    @classmethod
    def _read(cls, state: Any) -> Kept:
        numbers = [state[name] for name in ("epoch", "step", "num_steps")]
        if state["format"] != FORMAT or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError
        workers, learnt = state["workers"], state["learnt"]
        if learnt is not None:
            check_learnt(learnt, workers)
        form = None if state["form"] is None else EpochForm(**state["form"])
        if numbers[1] and form is None:
            raise ValueError
        return cls(Position(*numbers[:2]), numbers[2], workers, learnt, form)

    def apply(self, planner: Planner, workers: Sequence[str]) -> EstimatesRestored | None:
        """Have ``planner`` go on from what was learnt, if anything was."""
        if self.learnt is None:
            return None
        return planner.restore(self.learnt, places(self.workers, workers))


class Stateful(Protocol):
    """Has a state that can be kept."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""


class StateInCheckpoint(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A balancer's state as a text in a checkpoint of TensorFlow's."""

    def __init__(self, balancer: Stateful) -> None:
        self._balancer = balancer

    def serialize(self) -> str:
        """Return the state."""
        return as_text(self._balancer.state_dict())

    def deserialize(self, string_value: str | bytes) -> None:
        """Have the balancer go on from it."""
        self._balancer.load_state_dict(from_text(tf.compat.as_text(string_value)))


def as_text(state: dict[str, Any]) -> str:
    """Return a state as JSON, arrays and tuples by name."""
    return json.dumps(_written(state))


def from_text(text: str) -> Any:
    """Return what ``as_text`` wrote."""
    return _read(json.loads(text))


def _written(value: Any) -> Any:
    if isinstance(value, dict):
        return {"dict": [[key, _written(item)] for key, item in value.items()]}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [_written(item) for item in value]}
    if isinstance(value, np.ndarray):
        shape = list(value.shape)
        return {"array": value.ravel().tolist(), "dtype": value.dtype.str, "shape": shape}
    if isinstance(value, np.generic):
        return value.item()
    return value


def _read(value: Any) -> Any:
    match value:
        case {"dict": items}:
            return {key: _read(item) for key, item in items}
        case {"tuple": items}:
            return tuple(_read(item) for item in items)
        case {"list": items}:
            return [_read(item) for item in items]
        case {"array": numbers, "dtype": dtype, "shape": shape}:
            return np.array(numbers, dtype).reshape(shape)
    return value
