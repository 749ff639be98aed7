"""Where training over a stream stands, and what of it a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...exceptions import invalid
from ._loader_state import checked, is_count, is_counts, is_flag, is_size, sealed
from ._stream_terms import StreamKind


@dataclass(slots=True)
class Position:
    """What was handed out so far, the same on every rank.

    Attributes:
        passed: samples of the epoch by which each rank's stream has moved on.
        seed: what workers are seeded by, with the epoch; None before the first.
        epochs_begun: how many.
        steps_taken: steps of the epoch.
        finished: whether the epoch is over.
    """

    passed: list[int]
    seed: int | None = None
    epochs_begun: int = 0
    steps_taken: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class StateForm:
    """Writes a position down, and reads it back into a loader it fits.

    Attributes:
        kind: who reads what.
        global_batch_size: samples of a full step.
        num_readers: workers that read on each rank, at least 1: the order depends on it.
        world_size: number of ranks.
    """

    kind: StreamKind
    global_batch_size: int
    num_readers: int
    world_size: int

    def write(self, position: Position, steps_of_run: int) -> dict[str, Any]:
        """Return a state of plain values; where all read alike, one that is free of the ranks."""
        return sealed(
            {
                "kind": f"stream, {self.kind}",
                "epochs_begun": position.epochs_begun,
                "steps_taken": position.steps_taken,
                "steps_of_run": steps_of_run,
                "global_batch_size": self.global_batch_size,
                "num_readers": self.num_readers,
                "seed": position.seed or 0,
                "passed": position.passed[: self._num_written],
                "finished": position.finished,
            }
        )

    def read(self, state: object) -> dict[str, Any]:
        """Return ``state`` if a loader of this form can go on from it.

        Raises:
            ValueError: it is damaged, foreign, or of another form; the message says which.
        """
        where = "StreamLoader.load_state_dict(state=...)"
        good = checked(state, where, f"stream, {self.kind}", _CHECKS)
        for key, is_now, remedy in (
            ("global_batch_size", self.global_batch_size, "Give it to the balancer as back then."),
            ("num_readers", self.num_readers, "Set `DataLoader(num_workers=...)` as back then."),
        ):
            if good[key] != is_now:
                raise invalid(where, f"have {key}={is_now}, as this loader has", good[key], remedy)
        if len(good["passed"]) != self._num_written:
            raise invalid(
                where,
                f"be of {self._num_written} ranks, as shards belong to ranks",
                len(good["passed"]),
                "Resume on as many ranks, or have all read the `stream='same'`.",
            )
        return good

    def position(self, good: dict[str, Any]) -> Position:
        """Return the position in a state that ``read`` has let through."""
        begun = good["epochs_begun"]
        return Position(
            passed=good["passed"] * (self.world_size // self._num_written),
            seed=good["seed"] if begun else None,
            epochs_begun=begun,
            steps_taken=good["steps_taken"],
            finished=good["finished"],
        )

    @property
    def _num_written(self) -> int:
        return 1 if self.kind == "same" else self.world_size


_CHECKS = {
    "epochs_begun": is_count,
    "steps_taken": is_count,
    "steps_of_run": is_count,
    "global_batch_size": is_size,
    "num_readers": is_size,
    "seed": is_count,
    "passed": lambda value: is_counts(value) and bool(value),
    "finished": is_flag,
}
