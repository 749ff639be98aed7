"""The plans of a recorded run, repeated."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, final

import numpy as np

from .._types import Cluster, Decision, StepTimings
from ..exceptions import invalid
from ._base import AbstractPolicy
from ._plan_record import PlanRecord, read_plans
from ._splits import is_feasible, refit


@final
@dataclass(frozen=True, slots=True)
class Replay(AbstractPolicy[int]):
    """The sizes of a recorded run, step by step, whatever is measured.

    For debugging bit by bit. In training, every plan takes effect in the same step as in the
    record, so each rank computes the same samples in the same forwards. With the same seeds, code,
    devices and ``torch.use_deterministic_algorithms(True)``, the parameters are the same bit by
    bit. After the end of the record its last sizes stay, and an event says so.

    The record is read once, when the policy is made. Of a file with several runs, the newest one
    counts. The replay has to begin at the first step of that run, so from the same checkpoint if it
    loaded one.

    Events do not say which samples were claimed within a step or assigned by cost, so such a run is
    refused. If memory ran out in the recorded run, parts of a step ran again; this is not repeated.

    Args:
        run: the run's folder, as given to ``Runtime(run_dir=...)``, or its ``events.jsonl``.

    Attributes:
        record: the plans.

    Raises:
        ValueError: plans are missing or damaged, or do not say which samples a rank computed; in
            training, the number of workers, the global batch or the first step differs.
        OSError: the file cannot be read.
    """

    name: ClassVar[str] = "replay"

    run: str | Path
    record: PlanRecord = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "record", read_plans(self.run))

    def init(self, cluster: Cluster) -> Decision[int]:
        """Return the first sizes.

        Raises:
            ValueError: the record is of other workers or another global batch.
        """
        self.check(cluster.world_size, cluster.global_batch_size)
        return self._at(cluster, 0)

    def update(self, cluster: Cluster, timings: StepTimings, state: int) -> Decision[int]:
        return self._at(cluster, state + timings.num_steps)

    def check(self, world_size: int, global_batch_size: int) -> None:
        """Raise unless the record is of as many workers and samples.

        Raises:
            ValueError: it is not.
        """
        record = self.record
        if (record.world_size, record.global_batch_size) != (world_size, global_batch_size):
            raise invalid(
                "Replay(run=...)",
                f"be of {world_size} workers and a global batch of {global_batch_size}",
                f"{record.world_size} workers and {record.global_batch_size} in {self.run}",
                "Start as many workers, with the same batch size.",
            )

    def _at(self, cluster: Cluster, count: int) -> Decision[int]:
        step = self.record.first_step + count
        sizes = np.array(self.record.in_force(step).batch_size, np.int64)
        reason = f"replay: as in step {step} of the record"
        if step > self.record.last_step:
            reason = "replay: the last sizes, as the record ends before"
        if not is_feasible(sizes, cluster):
            sizes, reason = refit(sizes, cluster), "replay: cut to the bounds in force"
        return Decision(sizes, count, reason)
