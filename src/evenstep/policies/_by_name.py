"""A policy by its name, and whether policies want to know what the machines have to spare."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from typing import Any

from ..exceptions import invalid
from ..prediction import AbstractPredictor
from ._base import AbstractPolicy

_CALLER = "by_name(name=...)"


def by_name(name: str) -> AbstractPolicy[Any]:
    """Return the policy called ``name``, with its defaults.

    Usage:
        by_name("auto")
        by_name("my_package.policies:Mine")

    Args:
        name: a policy's own ``name``, or ``"module:Class"`` for a class that is imported from
            there. Either way it is built without arguments; one that needs some, or other
            settings, is passed as an instance instead.

    Raises:
        ValueError: there is no such policy, or it cannot be built without arguments.
    """
    known = _exported()
    named = _imported(name) if ":" in name else known.get(name)
    if named is None:
        given = sorted(without_settings())
        near = difflib.get_close_matches(name.lower(), known, n=1)
        remedy = f"Did you mean {near[0]!r}?" if near else "Names are lower case, with hyphens."
        if others := ", ".join(sorted(known.keys() - given)):
            remedy += f" {others} need settings: pass an instance."
        rule = f"be one of {', '.join(given)} or 'module:Class'"
        raise invalid(_CALLER, rule, repr(name), remedy)
    if needed := _needed_settings(named):
        settings = ", ".join(f"{setting}=..." for setting in needed)
        rule, got = "name a class that needs no settings", f"{name!r}, which needs"
        remedy = f"Pass an instance: `{named.__name__}({settings})`."
        raise invalid(_CALLER, rule, f"{got} {', '.join(needed)}", remedy)
    return named()


def _imported(name: str) -> type[AbstractPolicy[Any]]:
    """Return the class that ``"module:Class"`` names."""
    module, _, attribute = name.partition(":")
    try:
        value: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise invalid(
            _CALLER,
            "be 'module:Class' of something that can be imported",
            f"{name!r} ({error})",
            "Check the spelling, and that the module is on the Python path.",
        ) from error
    if not (inspect.isclass(value) and issubclass(value, AbstractPolicy)):
        raise invalid(
            _CALLER,
            "name a subclass of `AbstractPolicy`",
            f"{name!r}, which is {value!r}",
            "Inherit from `evenstep.policies.AbstractPolicy`.",
        )
    return value


def _needed_settings(named: type[Any]) -> list[str]:
    """Return the arguments without which it cannot be built."""
    parameters = inspect.signature(named).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def without_settings() -> tuple[str, ...]:
    """Return the names of all policies that are built without arguments."""
    return tuple(name for name, policy in _exported().items() if not _needed_settings(policy))


def _exported() -> dict[str, type[AbstractPolicy[Any]]]:
    """Return every policy that evenstep has, by name."""
    package = importlib.import_module(__package__)
    public = [getattr(package, attribute) for attribute in package.__all__]
    return {
        value.name: value
        for value in public
        if inspect.isclass(value)
        and issubclass(value, AbstractPolicy)
        and not inspect.isabstract(value)
    }


def reads_resources(policy: Any) -> bool:
    """Return whether ``policy`` stands on a predictor that reads CPU and memory, at any depth.

    Reading them costs every worker a tenth of a millisecond a step, so drivers ask first.
    """
    if isinstance(policy, AbstractPredictor):
        return policy.reads_resources
    if isinstance(policy, (tuple, list)):
        return any(map(reads_resources, policy))
    if not dataclasses.is_dataclass(policy):
        return False
    return any(reads_resources(getattr(policy, field.name)) for field in dataclasses.fields(policy))
