"""What loaders write into a checkpoint: checked before it is believed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...exceptions import invalid
from .deal._plans import EpochSteps
from .deal._stream_deal import StreamKind

Check = Callable[[Any], bool]


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields``, of plain values, with the checksum that ``_checked`` asks for."""
    return {**fields, "checksum": _checksum(fields)}


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _checked(state: object, where: str, kind: str, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return ``state`` if it is what ``sealed`` gave, of this kind, or raise ValueError."""
    problem = _problem(state, kind, checks)
    if problem is not None:
        raise invalid(
            where,
            "come from `state_dict()` of such a loader, complete and unchanged",
            problem,
            "Load the part of the checkpoint that holds the loader's state; if it is that part, "
            "the file is damaged: take the checkpoint before it.",
        )
    assert isinstance(state, dict)
    return {key: state[key] for key in ("kind", *checks, "checksum")}


def _problem(state: object, kind: str, checks: Mapping[str, Check]) -> str | None:
    if type(state) is not dict:
        return f"a {type(state).__name__}"
    if state.get("kind", kind) != kind:
        return f"one of the kind {repr(state['kind'])[:40]}, not {kind!r}"
    if missing := sorted({"kind", *checks, "checksum"} - state.keys()):
        return f"one without {missing}"
    for key, check in checks.items():
        if not check(state[key]):
            return f"{key}={repr(state[key])[:80]}"
    fields = {key: state[key] for key in ("kind", *checks)}  # adapters may add keys of their own
    if type(state["checksum"]) is not int or state["checksum"] != _checksum(fields):
        return "one whose checksum does not fit"
    return None


def _is_count(value: object) -> bool:
    """Return whether ``value`` is an integer of at least 0, and no truth value."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_size(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_order(value: object) -> bool:
    """Return whether ``value`` is an epoch, a length, and bytes of generators, if anything."""
    if type(value) is not list or any(type(number) is not int for number in value):
        return False
    if not value:
        return True
    return (
        len(value) > 2
        and abs(value[0]) < 1 << 63
        and 0 < value[1] <= len(value) - 2
        and all(0 <= number < 256 for number in value[2:])
    )


_COMMON: dict[str, Check] = {
    "epochs_begun": _is_count,
    "steps_taken": _is_count,
    "steps_of_run": _is_count,
    "global_batch_size": _is_size,
}
_ORDERED: dict[str, Check] = _COMMON | {
    "num_samples": _is_size,
    "order": _is_order,
    "fingerprint": lambda value: value is None or _is_count(value),
    "num_fingerprinted": _is_count,
}
_BATCHED: dict[str, Check] = _ORDERED | {
    "num_samples": _is_count,
    "num_steps": _is_count,
    "position": _is_count,
}
_STREAMED: dict[str, Check] = _COMMON | {
    "num_readers": _is_size,
    "seed": _is_count,
    "passed": lambda value: type(value) is list and bool(value) and all(map(_is_count, value)),
    "finished": lambda value: type(value) is bool,
}


@dataclass(frozen=True, slots=True)
class OrderedForm:
    """Writes down how far an order was trained on, and reads it back into a loader it fits.

    Attributes:
        global_batch_size: samples of a step that plans are made for.
        num_samples: of every epoch; None where its steps are batches of any size, and it ends
            where they do.
        num_steps: likewise.
    """

    global_batch_size: int
    num_samples: int | None
    num_steps: int

    def write(
        self,
        order: dict[str, Any],
        steps: EpochSteps,
        *,
        epochs_begun: int,
        steps_taken: int,
        steps_of_run: int,
    ) -> dict[str, Any]:
        """Return a state of plain values, free of the number of ranks."""
        fields = {
            "kind": self._kind,
            "epochs_begun": epochs_begun,
            "steps_taken": steps_taken,
            "steps_of_run": steps_of_run,
            "global_batch_size": self.global_batch_size,
            "num_samples": self.num_samples,
        }
        if self.num_samples is None:
            position = steps.end(steps_taken)
            own = {"num_samples": steps.num_samples, "num_steps": len(steps), "position": position}
            fields |= own
        return sealed(fields | order)

    @property
    def _kind(self) -> str:
        return "order" if self.num_samples is not None else "batches"

    def read(self, state: object) -> dict[str, Any]:
        """Return ``state`` if a loader of this form can continue from it, or raise ValueError."""
        where = "BalancedLoader.load_state_dict(state=...)"
        num_samples, num_steps = self.num_samples, self.num_steps
        good = _checked(state, where, self._kind, _BATCHED if num_samples is None else _ORDERED)
        size = good["global_batch_size"]
        if num_samples is None:  # the order alone says what a step has
            num_samples, num_steps = good["num_samples"], good["num_steps"]
        elif size != self.global_batch_size:
            raise invalid(
                where,
                f"be of the global batch size {self.global_batch_size}",
                size,
                f"With another number of ranks, give `Balancer({size})` and the loader a "
                f"`batch_size` of that over the number of ranks, rounded up.",
            )
        is_beyond = good.get("position", 0) > num_samples or good["steps_taken"] > num_steps
        if good["num_samples"] != num_samples or is_beyond:
            raise invalid(
                where,
                f"be of an epoch of {num_samples} samples in {num_steps} steps",
                f"one of {good['num_samples']} samples after step {good['steps_taken']}",
                "Give the loader the data set, sampler and `drop_last` of back then.",
            )
        begun, drawn = good["epochs_begun"] > 0, good["fingerprint"] is not None
        if begun != drawn or begun != bool(good["order"]) or (good["steps_taken"] and not begun):
            raise invalid(
                where,
                "have an order if, and only if, an epoch was begun",
                f"one after {good['epochs_begun']} epochs and {good['steps_taken']} steps",
                "Take the checkpoint before it.",
            )
        return good


@dataclass(slots=True)
class StreamPosition:
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

    def next_epoch(self) -> StreamPosition:
        """Return the begin of the epoch after this one."""
        return StreamPosition([0] * len(self.passed), self.seed, self.epochs_begun + 1)


@dataclass(frozen=True, slots=True)
class StreamForm:
    """Writes a position down, and reads it back into a loader it fits.

    The order of a stream depends on the workers that read it on each rank, at least 1.
    """

    kind: StreamKind
    global_batch_size: int
    num_readers: int
    world_size: int

    def write(self, position: StreamPosition, steps_of_run: int) -> dict[str, Any]:
        """Return a state of plain values; where all read alike, one that is free of the ranks."""
        written = replace(
            position, passed=position.passed[: self._num_written], seed=position.seed or 0
        )
        return sealed(
            {
                "kind": f"stream, {self.kind}",
                "steps_of_run": steps_of_run,
                "global_batch_size": self.global_batch_size,
                "num_readers": self.num_readers,
            }
            | asdict(written)
        )

    def read(self, state: object) -> dict[str, Any]:
        """Return ``state`` if a loader of this form can continue from it, or raise ValueError."""
        where = "StreamLoader.load_state_dict(state=...)"
        good = _checked(state, where, f"stream, {self.kind}", _STREAMED)
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

    def position(self, good: dict[str, Any]) -> StreamPosition:
        """Return the position in a state that ``read`` has let through."""
        begun = good["epochs_begun"]
        return StreamPosition(
            passed=good["passed"] * (self.world_size // self._num_written),
            seed=good["seed"] if begun else None,
            epochs_begun=begun,
            steps_taken=good["steps_taken"],
            finished=good["finished"],
        )

    @property
    def _num_written(self) -> int:
        return 1 if self.kind == "same" else self.world_size
