"""The steps of a run that is not open yet: there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, final

import torch

from ..planner import Plan


@final
class NoSteps:
    """Stands for a run's steps until its first loop begins: forwards belong to no batch."""

    stopping = False
    plan: Plan | None = None
    open_meter = num_samples = num_units = None
    num_samples_seen = (0, 0)
    num_ahead = 0

    def begin_use(
        self, model: int, tensors: Sequence[torch.Tensor], *, reduces: bool | None
    ) -> None:
        """Return None: no batch was handed out."""

    def use_of_loss(self) -> None:
        """Return None: there was no forward of a step."""

    def named(self, batch: Any) -> NoReturn:
        """Raise: no batch was handed out."""
        raise RuntimeError("No batch was handed out yet: loop over what `prepare` returned.")

    def outside(self) -> None:
        """Do nothing: a forward before the first loop is no mistake."""

    def end_use(self) -> None:
        """Do nothing."""

    def backward_begins(self) -> None:
        """Do nothing."""

    def backward_done(self, uses: Sequence[Any]) -> None:
        """Do nothing."""

    def reduced(self) -> None:
        """Do nothing."""

    def collective(self, *, entered: bool) -> None:
        """Do nothing."""

    def report_now(self) -> None:
        """Do nothing."""

    def came_to_end(self) -> None:
        """Do nothing."""

    def end_epoch(self) -> None:
        """Do nothing."""
