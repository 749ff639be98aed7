"""Schemes by the names that a command line gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .._named import imported, needed_settings
from ..exceptions import invalid
from ..planner.claims import AbstractScheme, Bsp, Hybrid

SCHEMES: dict[str, Callable[[float], AbstractScheme[Any]]] = {
    "bsp": lambda move_s: Bsp(),
    "hybrid": lambda move_s: replace(Hybrid(), claim_s=move_s),
}


def scheme_by_name(name: str, *, move_s: float = 0.0) -> AbstractScheme[Any]:
    """Return the scheme called ``name``, with its defaults.

    Args:
        name: ``"bsp"``, ``"hybrid"``, or ``"module:Class"`` for a class that is built without
            arguments.
        move_s: seconds that a claim takes. A class of one's own knows its costs.

    Raises:
        ValueError: there is no such scheme, or it cannot be built without arguments.
    """
    if ":" in name:
        return _imported(name)
    if name not in SCHEMES:
        raise invalid(
            "scheme_by_name(name=...)",
            f"be one of {', '.join(SCHEMES)} or 'module:Class'",
            repr(name),
            "Names are lower case, with hyphens.",
        )
    return SCHEMES[name](move_s)


def _imported(name: str) -> AbstractScheme[Any]:
    scheme: type[AbstractScheme[Any]] = imported(
        name, AbstractScheme, caller="scheme_by_name(name=...)"
    )
    if needed := needed_settings(scheme):
        raise invalid(
            "scheme_by_name(name=...)",
            "name a scheme that needs no settings",
            f"{name!r}, which needs {', '.join(needed)}",
            "Give its fields defaults, or call `sim.run_on(scheme=...)` yourself.",
        )
    return scheme()
