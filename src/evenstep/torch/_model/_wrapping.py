"""What a step owes to how the models are wrapped: plain, in DDP, sharded by FSDP2.

- Plain and DDP synchronise in the last backward, at its end. A rank's own time goes from the
  hand-out to the end of its own backward.
- FSDP2 in loops over ``loader.steps()`` gathers before the first forward and reduces all through
  the last backward. Own time goes from the hand-out of the first micro-batch to that of the last,
  and is scaled to the local batch; so every rank needs two micro-batches.
- FSDP2 in plain loops synchronises all through the step, and has no time of its own that could
  be told from waiting.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...exceptions import EvenstepWarning, invalid
from ...planner import Bounds
from ...policies import AbstractPolicy, Equal, Fixed
from .._clock import AbstractClock, BlindMeter, LeadMeter, StepMeter
from ._fsdp import Shards
from ._several import SeveralDdps

if TYPE_CHECKING:
    from ._models import BalancedModel


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How the models of a run are wrapped, and which kind of loop they run in.

    Attributes:
        shards: one for each model that FSDP2 shards over more than one rank.
        cuts: whether the loop takes micro-batches.
        several: the models in DDP, if there are more than one in a loop that takes micro-batches.
        ddps: the models in DDP.
    """

    shards: tuple[Shards, ...]
    cuts: bool
    several: SeveralDdps | None = None
    ddps: tuple[DistributedDataParallel, ...] = ()

    @classmethod
    def of(
        cls, models: Sequence[BalancedModel], bounds: Bounds, *, world_size: int, cuts: bool
    ) -> Wrapping:
        """Return how ``models`` are wrapped; a single rank waits for no other.

        Raises:
            ValueError: they, or what is to vary, do not go with the kind of loop.
        """
        if not cuts and bounds.vary == "count":
            raise invalid(
                "Balancer(bounds=Bounds(vary='count'))",
                "be used in a loop over `loader.steps()`",
                "`for batch in loader`",
                "Loop over the steps and their micro-batches: `for step in loader.steps(): for "
                "batch in step: ...`.",
            )
        if world_size == 1:
            return cls((), cuts)
        if cuts:
            for model in models:
                _refuse_sync_batch_norm(model.module)
                _refuse_static_graph(model)
        shards = tuple(model.shards for model in models if model.shards is not None)
        ddps = tuple(model.ddp for model in models if model.ddp is not None)
        return cls(shards, cuts, SeveralDdps(ddps) if cuts and len(ddps) > 1 else None, ddps)

    @property
    def min_forwards(self) -> int:
        """Fewest micro-batches of a rank in a step, for its time to be known."""
        return 2 if self.shards and self.cuts else 1

    @property
    def is_sharded(self) -> bool:
        """Whether collectives run in the middle of forwards and backwards."""
        return bool(self.shards)

    def open(self, policy: AbstractPolicy[Any]) -> None:
        """Get the models ready, and say what cannot be measured.

        Args:
            policy: for which no time is missing if it does without.
        """
        if self.cuts:
            for part in self.shards:
                part.keep()
        elif self.shards and not isinstance(policy, Equal | Fixed):
            warnings.warn(
                "FSDP2 waits for other ranks within every forward and backward, so in "
                "`for batch in loader` computing cannot be separated from waiting: nothing is "
                "measured, and the batch sizes stay as they are. Loop over `loader.steps()`, "
                "where it can, or choose equal sizes: `Balancer(policy='equal')`.",
                EvenstepWarning,
                stacklevel=2,
            )

    def check_reduced(self) -> None:
        """Raise DDP's own error if a backward is over here and not all it reduces was ready.

        DDP raises it in the next forward. That is too late where a rank waits before for others,
        which wait in this reduction.

        Raises:
            RuntimeError: a parameter had no part in the loss.
        """
        for ddp in self.ddps:
            ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]

    @property
    def meets(self) -> bool:
        """Whether all ranks meet before the first forward of a step."""
        return bool(self.shards) or self.several is not None

    def meet(self) -> None:
        """Do what is collective before the first forward: make parameters whole, say."""
        if self.several is not None:
            self.several.meet()
        if self.cuts:
            for part in self.shards:
                part.gather()

    def meter(self, clock: AbstractClock) -> StepMeter:
        """Return what measures a rank's own time, as far as there is such a thing."""
        if not self.shards:
            return StepMeter(clock)
        return LeadMeter(clock) if self.cuts else BlindMeter(clock)


def _refuse_static_graph(model: BalancedModel) -> None:
    """Raise where DDP learns the graph from its first backward, whether that synchronises or not.

    In a step of several micro-batches it does not, and torch fails in a later one.
    """
    if model.ddp is not None and model.ddp.static_graph:
        raise invalid(
            "A model in a loop over `loader.steps()`",
            "be in a DDP without a static graph",
            "`DDP(model, static_graph=True)`",
            "Leave `static_graph` out, or use `for batch in loader`.",
        )


def _refuse_sync_batch_norm(module: nn.Module) -> None:
    """Raise for a collective in the forward: ranks with unlike counts would wait for ever."""
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise invalid(
            "A model in a loop over `loader.steps()`",
            "have no SyncBatchNorm, in which ranks would wait for those with fewer micro-batches",
            f"{type(module).__name__} with it",
            "Use `for batch in loader`, where every rank has one forward, or GroupNorm.",
        )
