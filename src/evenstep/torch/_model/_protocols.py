"""What hooks on models ask of the rest: to which batch a forward belongs, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .._clock import StepMeter
from .._finite import Look

Weight = float | Callable[[], float]
"""What a gradient is multiplied by: known in the forward, or asked for in the backward."""


class Use(Protocol):
    """What a forward keeps for its backward.

    Attributes:
        weight: what the gradient at its output is multiplied by.
        looks: at what its backward began with, which is not finite if the loss is not.
    """

    weight: Weight
    looks: list[Look]


class ModelSteps(Protocol):
    """The steps of a run, as hooks on models see them.

    Attributes:
        open_meter: the meter of the step under way; None outside of one.
    """

    @property
    def open_meter(self) -> StepMeter | None: ...

    def begin_use(
        self, model: int, tensors: Sequence[torch.Tensor], *, reduces: bool | None
    ) -> Use | None:
        """Hear that a forward begins that may have a backward; None outside of a balanced step.

        Args:
            model: its number, in the order of ``prepare``.
            tensors: its inputs.
            reduces: whether its backward reduces gradients; None where that is not known.
        """
        ...

    @property
    def num_samples_seen(self) -> tuple[int, int]:
        """Samples that this rank trained on: in the run, and in its newest step."""
        ...

    def report_now(self) -> None:
        """Report the step under way: a collective comes before the next plan point."""
        ...

    def outside(self) -> None:
        """Hear of a forward in training that has no batch."""
        ...

    def end_use(self) -> None:
        """Hear that a forward is over."""
        ...

    def backward_begins(self) -> None:
        """Hear that a backward through balanced outputs begins."""
        ...

    def backward_done(self, uses: list[Any]) -> None:
        """Hear that this rank's own part of it is done: other ranks' may not be.

        Args:
            uses: of the forwards that it went through.
        """
        ...

    def reduced(self) -> None:
        """Hear that what others added to it is over too, such as DDP's wait."""
        ...

    def collective(self, *, entered: bool) -> None:
        """Hear that the main thread enters or leaves a collective outside of a backward."""
        ...


class ModelSession(Protocol):
    """This rank's session, as hooks on models see it.

    Attributes:
        steps: of the run; before it is open, something that no forward belongs to.
    """

    @property
    def steps(self) -> ModelSteps: ...
