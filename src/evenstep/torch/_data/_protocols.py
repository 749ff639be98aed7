"""What the loader asks of whoever decides, and whom it tells how a step goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ...control import Plan
from ...sync import Claim


class PlanSource(Protocol):
    """Where plans come from.

    All ranks are given the same plans, and all of them: ``subscribe`` leaves none out, so that
    each rank replays who owns which sample from the integers alone.
    """

    def at(self, step: int) -> Plan:
        """Return the plan of optimizer step ``step``, counted over the run; block until known.

        Called once a step, when the loop comes back for it: the step before is done.
        """
        ...

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Call ``listener``, from any thread, with every later plan as soon as it is known.

        In the order of their epochs; the loader starts to fetch what it gained. The listener
        neither blocks nor raises, and never calls back into the source.
        """
        ...

    def claim(
        self, step: int, *, speed: float | None = None, own: bool = False
    ) -> tuple[Claim, ...]:
        """Return what this rank computes next of the step under way; nothing if it is done.

        Args:
            step: one whose plan has samples up for claims.
            speed: samples per second of its newest samples in this step, if there were any.
            own: whether to get all that is left of its own part.
        """
        ...


class Ranks(Protocol):
    """The ranks that read a stream.

    Attributes:
        rank: this one.
        world_size: how many.
    """

    rank: int
    world_size: int

    def share_indices(self, indices: list[int] | None) -> list[int]:
        """Return on every rank the integers that rank 0 calls it with; None on the others."""
        ...

    def gather(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Send ``numbers``, as many on every rank, and return what waits for everybody's."""
        ...


class StepListener(Protocol):
    """Who times and weights the steps. Called from whichever thread reads the loader."""

    def begin_epoch(self, *, cuts: bool) -> None:
        """Hear that a loop over the loader begins, before its first plan is asked for.

        Args:
            cuts: whether it is a loop over ``loader.steps()``, which may cut local batches.
        """
        ...

    def begin_step(
        self,
        step: int,
        *,
        num_samples: int,
        global_num_samples: int,
        data_s: float,
        units: float | None = None,
    ) -> None:
        """Hear that the batch of ``step`` is about to be handed out.

        Args:
            step: optimizer step, counted over the run.
            num_samples: this rank's share; 0 if what it gets is a stand-in of weight 0.
            global_num_samples: samples of the step over all ranks.
            data_s: seconds spent waiting for input, without waiting for the plan.
            units: this rank's units of the step; None where they are samples.
        """
        ...

    def begin_forward(
        self, step: int, batch: Any, *, num_samples: int, is_last: bool, units: float | None = None
    ) -> None:
        """Hear that a batch for one forward is handed out next: plain loops, one a step.

        Args:
            step: whose batch it is.
            batch: as the loop gets it.
            num_samples: samples in it that count; 0 for a stand-in of weight 0.
            is_last: whether the step's backward after it is the one that synchronises.
            units: units in it; None where they are samples.
        """
        ...

    def num_ahead(self) -> int:
        """Return how many steps the loop has fetched before it used those at hand."""
        ...

    def begin_claim(self) -> None:
        """Hear that this rank asks for more of the step under way, or waits for its samples."""
        ...

    def end_claim(self, num_samples: int) -> None:
        """Hear that it goes on, with so many samples more."""
        ...

    def came_to_end(self) -> None:
        """Hear that a loop over the loader came to its end, before ``end_epoch``."""
        ...

    def end_epoch(self) -> None:
        """Hear that the loop is over: at the end of the epoch, or where the user left it."""
        ...
