"""Find a policy by the name that a configuration or a command line gives it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, TypeGuard

from .._named import imported, needed_settings
from ..exceptions import invalid
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
    caller = "by_name(name=...)"
    policy_class: type[AbstractPolicy[Any]] = (
        imported(name, AbstractPolicy, caller=caller) if ":" in name else _exported(name)
    )
    if needed := needed_settings(policy_class):
        settings = ", ".join(f"{setting}=..." for setting in needed)
        raise invalid(
            "by_name(name=...)",
            "name a policy that needs no settings",
            f"{name!r}, which needs {', '.join(needed)}",
            f"Pass an instance: `{policy_class.__name__}({settings})`.",
        )
    return policy_class()


def _exported(name: str) -> type[AbstractPolicy[Any]]:
    package = importlib.import_module(__package__)
    public = [getattr(package, attribute) for attribute in package.__all__]
    found = {
        value.name: value for value in public if _is_policy(value) and not inspect.isabstract(value)
    }
    if name not in found:
        given = [other for other in sorted(found) if not needed_settings(found[other])]
        raise invalid(
            "by_name(name=...)",
            f"be one of {', '.join(given)} or 'module:Class'",
            repr(name),
            f"Names are lower case, with hyphens. {', '.join(sorted(found.keys() - given))} need "
            "settings: pass an instance.",
        )
    return found[name]


def _is_policy(value: object) -> TypeGuard[type[AbstractPolicy[Any]]]:
    return inspect.isclass(value) and issubclass(value, AbstractPolicy)
