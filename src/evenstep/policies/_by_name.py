"""Find a policy by the name that a configuration or a command line gives it."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, TypeGuard

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
    policy_class = _imported(name) if ":" in name else _exported(name)
    parameters = inspect.signature(policy_class).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if needed:
        raise invalid(
            "by_name(name=...)",
            "name a policy that needs no settings",
            f"{name!r}, which needs {', '.join(needed)}",
            f"Pass an instance: `{policy_class.__name__}({needed[0]}=...)`.",
        )
    return policy_class()


def _exported(name: str) -> type[AbstractPolicy[Any]]:
    package = importlib.import_module(__package__)
    public = [getattr(package, attribute) for attribute in package.__all__]
    found = {
        value.name: value for value in public if _is_policy(value) and not inspect.isabstract(value)
    }
    if name not in found:
        raise invalid(
            "by_name(name=...)",
            f"be one of {', '.join(sorted(found))} or 'module:Class'",
            repr(name),
            "Names are lower case, with hyphens.",
        )
    return found[name]


def _imported(name: str) -> type[AbstractPolicy[Any]]:
    module, _, attribute = name.partition(":")
    try:
        value = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise invalid(
            "by_name(name=...)",
            "be 'module:Class' of something that can be imported",
            f"{name!r} ({error})",
            "Check the spelling, and that the module is on the Python path.",
        ) from error
    if not _is_policy(value):
        raise invalid(
            "by_name(name=...)",
            "name a subclass of `AbstractPolicy`",
            f"{name!r}, which is {value!r}",
            "Inherit from `evenstep.policies.AbstractPolicy`.",
        )
    return value


def _is_policy(value: object) -> TypeGuard[type[AbstractPolicy[Any]]]:
    return inspect.isclass(value) and issubclass(value, AbstractPolicy)
