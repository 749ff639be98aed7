"""What a balancer keeps for a restart: where the data is, and what was learnt."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import tensorflow as tf

from .._run._estimates import Estimates
from ..exceptions import invalid

_FORMAT = "evenstep-tensorflow-2"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the order of all epochs.

    Attributes:
        epoch: from 0.
        step: steps of it that are done.
    """

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class EpochForm:
    """What an epoch's steps are cut from; a place within one means nothing in another.

    Attributes:
        num_samples: of an epoch.
        global_batch_size: samples of a full step.
        order: what draws the order, in words.
    """

    num_samples: int
    global_batch_size: int
    order: str

    def __str__(self) -> str:
        steps = f"steps of {self.global_batch_size}"
        return f"an epoch of {self.num_samples} samples in {steps}, {self.order}"


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a restart goes on from.

    Attributes:
        position: where an interrupted run goes on.
        num_steps: steps done in the run.
        form: of the epochs that the position is in; None before there was data.
        estimates: what was learnt about the workers, by host.
    """

    position: Position = Position()
    num_steps: int = 0
    form: EpochForm | None = None
    estimates: Estimates = field(default_factory=Estimates)

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as nested dicts and lists of plain values."""
        return {
            "format": _FORMAT,
            **asdict(self.position),
            "num_steps": self.num_steps,
            "form": None if self.form is None else asdict(self.form),
            "estimates": self.estimates.state_dict(),
        }

    @classmethod
    def read(cls, state: Any) -> Kept:
        """Return what ``state_dict`` wrote.

        Raises:
            ValueError: it is something else, or broken.
        """
        try:
            numbers = epoch, step, num_steps = [
                state[name] for name in ("epoch", "step", "num_steps")
            ]
            if state["format"] != _FORMAT or any(type(n) is not int or n < 0 for n in numbers):
                raise ValueError(f"it is not of the format {_FORMAT!r}")
            form = None if state["form"] is None else EpochForm(**state["form"])
            if step and form is None:
                raise ValueError("it is a place within an unknown epoch")
            estimates = Estimates.read(state["estimates"])
        except Exception as error:  # what is no state fails in every way there is
            raise invalid(
                "Balancer.load_state_dict(state=...)",
                "come from `Balancer.state_dict()`",
                reprlib.repr(state)[:80],
                "Load the part of the checkpoint that holds the balancer's state.",
            ) from error
        return cls(Position(epoch, step), num_steps, form, estimates)


class StateInCheckpoint(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A balancer's state as a text in a checkpoint of TensorFlow's."""

    def __init__(
        self, save: Callable[[], dict[str, Any]], load: Callable[[dict[str, Any]], None]
    ) -> None:
        self._save = save
        self._load = load

    def serialize(self) -> str:
        """Return the state."""
        return json.dumps(self._save())

    def deserialize(self, string_value: str | bytes) -> None:
        """Have the balancer go on from it."""
        self._load(json.loads(string_value))
