"""A policy by its name, and whether policies want to know what the machines have to spare."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

from .._named import built, needed_settings
from ..prediction import AbstractPredictor
from ._base import AbstractPolicy


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
    policy: AbstractPolicy[Any] = built(
        name, AbstractPolicy, _exported(), caller="by_name(name=...)"
    )
    return policy


def without_settings() -> tuple[str, ...]:
    """Return the names of all policies that are built without arguments."""
    return tuple(name for name, policy in _exported().items() if not needed_settings(policy))


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
