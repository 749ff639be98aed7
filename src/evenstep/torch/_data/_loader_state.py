"""What a loader writes into a checkpoint, and how it is read: checked before it is believed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...exceptions import invalid

Check = Callable[[Any], bool]


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields``, of plain values, with the checksum that ``checked`` asks for."""
    return {**fields, "checksum": _checksum(fields)}


def checked(state: object, name: str, kind: str, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return ``state`` if it is what ``sealed`` gave.

    Args:
        state: what was loaded.
        name: class and argument, for errors.
        kind: the value of ``"kind"``: states of other kinds of loaders are not this one's.
        checks: what each further field has to fulfil.

    Raises:
        ValueError: it is anything else: of another kind, cut short, changed, or foreign.
    """
    problem = _problem(state, kind, checks)
    if problem is not None:
        raise invalid(
            name,
            "come from `state_dict()` of such a loader, complete and unchanged",
            problem,
            "Load the part of the checkpoint that holds the loader's state; if it is that part, "
            "the file is damaged: take the checkpoint before it.",
        )
    assert isinstance(state, dict)
    return {key: state[key] for key in ("kind", *checks, "checksum")}


def is_count(value: object) -> bool:
    """Tell whether ``value`` is an integer of at least 0, and no truth value."""
    return type(value) is int and 0 <= value < 1 << 63


def is_size(value: object) -> bool:
    """Tell whether ``value`` is an integer of at least 1."""
    return is_count(value) and value != 0


def is_counts(value: object) -> bool:
    """Tell whether ``value`` is a list of integers of at least 0."""
    return type(value) is list and all(map(is_count, value))


def is_flag(value: object) -> bool:
    """Tell whether ``value`` is a truth value."""
    return type(value) is bool


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


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


@dataclass(frozen=True, slots=True)
class OrderedForm:
    """Writes down how far an order was trained on, and reads it back into a loader it fits.

    Attributes:
        global_batch_size: samples of a full step.
        num_samples: indices in the order of an epoch.
        num_steps: steps of an epoch.
    """

    global_batch_size: int
    num_samples: int
    num_steps: int

    def write(
        self,
        *,
        epochs_begun: int,
        steps_taken: int,
        steps_of_run: int,
        order: list[int],
        fingerprint: int | None,
        num_fingerprinted: int,
    ) -> dict[str, Any]:
        """Return a state of plain values, free of the number of ranks."""
        return sealed(
            {
                "kind": "order",
                "epochs_begun": epochs_begun,
                "steps_taken": steps_taken,
                "steps_of_run": steps_of_run,
                "global_batch_size": self.global_batch_size,
                "num_samples": self.num_samples,
                "order": order,
                "fingerprint": fingerprint,
                "num_fingerprinted": num_fingerprinted,
            }
        )

    def read(self, state: object) -> dict[str, Any]:
        """Return ``state`` if a loader of this form can go on from it.

        Raises:
            ValueError: it is damaged, foreign, or of another form; the message says which.
        """
        where = "BalancedLoader.load_state_dict(state=...)"
        good = self._checked(state, where)
        size = good["global_batch_size"]
        if size != self.global_batch_size:
            raise invalid(
                where,
                f"be of the global batch size {self.global_batch_size}",
                size,
                f"With another number of ranks, give `Balancer({size})` and the loader a "
                f"`batch_size` of that over the number of ranks, rounded up.",
            )
        if good["num_samples"] != self.num_samples or good["steps_taken"] > self.num_steps:
            raise invalid(
                where,
                f"be of an epoch of {self.num_samples} samples in {self.num_steps} steps",
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

    def _checked(self, state: object, where: str) -> dict[str, Any]:
        """Return ``state`` if it is whole, in the form of now."""
        if type(state) is not dict or "num_fingerprinted" in state or "fingerprint" not in state:
            return checked(state, where, "order", _ORDERED)
        # Until 0.1.0, the checksum was that of the whole epoch's order.
        checks = {key: check for key, check in _ORDERED.items() if key != "num_fingerprinted"}
        fields = checked(state, where, "order", checks)
        del fields["checksum"]
        covered = 0 if fields["fingerprint"] is None else fields["num_samples"]
        return sealed({**fields, "num_fingerprinted": covered})


def _is_order(value: object) -> bool:
    """Tell whether ``value`` is an epoch, a length, and bytes of generators, if anything."""
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


_ORDERED = {
    "epochs_begun": is_count,
    "steps_taken": is_count,
    "steps_of_run": is_count,
    "global_batch_size": is_size,
    "num_samples": is_size,
    "order": _is_order,
    "fingerprint": lambda value: value is None or is_count(value),
    "num_fingerprinted": is_count,
}
