"""What loaders ask of the rest: plans, a listener for every step, and ways to the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ..._diagnosis import Phase
from ..._planner import Plan, Work
from ..._types import IntArray
from ...claims._step_claims import Claim

ANEW = (
    "Prepare a new `DataLoader`. One for training needs a new `Balancer` too: `balancer.close()`, "
    "then prepare the same model and the new loader with it. "
    "`new.load_state_dict(old.state_dict())` keeps what was learnt about speeds."
)
"""What to do where data or settings are to change that were fixed in ``prepare``."""

ShareInts = Callable[[tuple[int, int], IntArray | None], IntArray]
"""Given a key and integers on rank 0, and the key and None elsewhere, return rank 0's on all.

The key says which round, and which of its messages.
"""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward gets.

    Attributes:
        batch: as the user's ``collate_fn`` made it.
        num_samples: samples in it that count; 0 for a stand-in of weight 0.
        counter: counts the units in a batch; None where they are samples.
        sizes: what each of its samples adds to its size, ``(num_samples,)``; None is 1.
        keys: what each of its samples draws random numbers by, a stand-in included; None where
            those are the rank's own.
        units: what ``counter`` counted in this one, and 0 in a stand-in.
    """

    batch: Any
    num_samples: int
    counter: Callable[[Any], float] | None = None
    sizes: IntArray | None = field(default=None, compare=False)
    keys: IntArray | None = field(default=None, compare=False)
    units: float | None = None

    def counted(self, counter: Callable[[Any], float]) -> MicroBatch:
        """Return it with its units, which ``counter`` counts."""
        units = counter(self.batch) if self.num_samples else 0.0
        return replace(self, counter=counter, units=units)

    def cut(
        self, batch: Any, num_samples: int, *, sizes: IntArray | None, keys: IntArray | None
    ) -> MicroBatch:
        """Return a part of it, whose units are counted anew."""
        part = replace(self, batch=batch, num_samples=num_samples, sizes=sizes, keys=keys)
        return part if self.counter is None else part.counted(self.counter)

    @property
    def size(self) -> int:
        """What it takes up in memory, in samples or in what ``Cost(max_size=...)`` counts."""
        if self.sizes is None or not self.num_samples:
            return self.num_samples
        return int(self.sizes.sum())


class StepStart(NamedTuple):
    """A step whose batch is about to be handed out.

    Attributes:
        step: optimizer step, counted over the run.
        num_samples: this rank's share; 0 if it gets a stand-in of weight 0.
        global_num_samples: samples of the step over all ranks.
        data_s: seconds spent waiting for input, without waiting for the plan.
        units: this rank's units of the step; None where they are samples.
        work: what its samples cost; None where no costs are known.
        checksum: of who has which sample, the same on all ranks; 0 where none is known.
        equal_forwards: whether all ranks make as many forwards, and know it.
    """

    step: int
    num_samples: int
    global_num_samples: int
    data_s: float
    units: float | None = None
    work: Work | None = None
    checksum: int = 0
    equal_forwards: bool = False


class LoaderSteps(Protocol):
    """The steps of a run, called from the thread that reads the loader.

    What comes before ``at`` may be asked at any time, also before the run is open.

    Attributes:
        plan: of the newest step that was handed out; None before the first.
        plan_in_use: of the newest step that was trained on, the same on all ranks; None before.
        next_unused: the first step that was handed out and not used, else the next one; None
            before the first.
    """

    @property
    def plan(self) -> Plan | None: ...

    @property
    def plan_in_use(self) -> Plan | None: ...

    @property
    def next_unused(self) -> int | None: ...

    def report_now(self) -> None:
        """Report the step under way: a collective comes before the next plan point."""

    def timed(self, phase: Phase) -> AbstractContextManager[None]:
        """Return a context whose time is that of ``phase`` in the account of the step."""
        ...

    def at(self, step: int) -> Plan:
        """Return the plan of optimizer step ``step``, counted over the run; block until known.

        Called once a step, when the loop comes back for it: the step before is done.
        """

    def begin_forward(self, step: int, part: MicroBatch, *, is_last: bool) -> None:
        """Take note that the batch of one forward is handed out next: plain loops, one a step.

        Args:
            step: whose batch it is.
            part: the batch as the loop gets it, and what counts in it.
            is_last: whether the step's backward after it is the one that synchronises.
        """

    def claim(
        self, step: int, *, speed: float | None = None, own: bool = False
    ) -> tuple[Claim, ...]:
        """Return what this rank computes next of the step under way; nothing if it is done.

        Args:
            step: one whose plan has samples up for claims.
            speed: samples per second of its newest samples in this step, if there were any.
            own: whether to get all that is left of its own part.
        """

    def begin_step(self, start: StepStart) -> None:
        """Take note that the batch of a step is about to be handed out."""

    def begin_claim(self) -> None:
        """Take note that this rank asks for more of the step, or waits for its samples."""

    def end_claim(self, step: int, num_samples: int) -> None:
        """Take note that it continues, with so many samples more of ``step``."""

    def came_to_end(self) -> None:
        """Take note that a loop over the loader came to its end, before ``end_epoch``."""

    def end_epoch(self) -> None:
        """Take note that the loop is over: at the end of the epoch, or where the user left it."""


class LoaderSession(Protocol):
    """This rank's session, as loaders see it.

    All ranks are given the same plans, and all of them: ``subscribe`` leaves none out, so that
    each rank replays who owns which sample from the integers alone.

    Attributes:
        steps: of the run.
    """

    @property
    def steps(self) -> LoaderSteps: ...

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Call ``listener``, from any thread, with every later plan as soon as it is known.

        In the order of their epochs; the loader starts to fetch what it gained. The listener
        neither blocks nor raises, and never calls back into the session.
        """

    def begin_epoch(self, *, cuts: bool) -> None:
        """Open the run, with its first loop.

        Args:
            cuts: whether it is a loop over ``loader.steps()``, which may cut local batches.
        """


class LoaderRanks(Protocol):
    """The ranks that train on a loader, reached from any thread and without a collective.

    Attributes:
        rank: this one.
        world_size: how many.
    """

    rank: int
    world_size: int

    def check(self) -> None:
        """Raise if one of them was lost."""

    def share(self, key: tuple[int, int], ints: IntArray | None) -> IntArray:
        """Return on every rank the integers that rank 0 calls it with; see ``ShareInts``."""
        ...

    def gather(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Send ``numbers``, as many on every rank, and return what waits for those of all."""
        ...


class Collectives(Protocol):
    """The ranks once more, for what all of them come to at the same time."""

    rank: int
    world_size: int

    def share_indices(self, indices: list[int] | None) -> list[int]:
        """Return on every rank what rank 0 was called with; None elsewhere."""
        ...

    def share(self, value: Any) -> Any:
        """Return on every rank what rank 0 was called with."""

    def collect(self, value: Any) -> list[Any]:
        """Return on every rank what each rank was called with, in order."""
        ...
