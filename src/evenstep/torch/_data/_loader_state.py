"""What loaders write into a checkpoint: checked before it is believed."""

from __future__ import annotations

import json
import zlib
from typing import Any

from ...exceptions import invalid


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return ``fields``, of plain values, with the checksum that ``checked`` asks for."""
    return {**fields, "checksum": _checksum(fields)}


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, default=repr).encode())


def checked(state: object, where: str, like: dict[str, Any]) -> dict[str, Any]:
    """Return what ``sealed`` gave for fields of the same kind and keys, or raise ValueError."""
    problem = _problem(state, like)
    if problem is not None:
        raise invalid(
            where,
            "come from `state_dict()` of such a loader, complete and unchanged",
            problem,
            "Load the part of the checkpoint that holds the loader's state; if it is that part, "
            "the file is damaged: take the checkpoint before it.",
        )
    assert isinstance(state, dict)
    return {key: state[key] for key in (*like, "checksum")}


def _problem(state: object, like: dict[str, Any]) -> str | None:
    if type(state) is not dict:
        return f"a {type(state).__name__}"
    if (kind := state.get("kind", like["kind"])) != like["kind"]:
        return f"one of the kind {repr(kind)[:40]}, not {like['kind']!r}"
    if missing := sorted({*like, "checksum"} - state.keys()):
        return f"one without {missing}"
    fields = {key: state[key] for key in like}  # adapters may add keys of their own
    return None if state["checksum"] == _checksum(fields) else "one whose checksum does not fit"
