"""Classes that a configuration or a command line names, policies and schemes alike."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from .exceptions import invalid


def imported(name: str, base: type[Any], *, caller: str) -> type[Any]:
    """Return the class that ``"module:Class"`` names.

    Args:
        name: as given.
        base: what it has to inherit from.
        caller: the function for the message, with its argument.

    Raises:
        ValueError: it cannot be imported, or is something else.
    """
    module, _, attribute = name.partition(":")
    try:
        value: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise invalid(
            caller,
            "be 'module:Class' of something that can be imported",
            f"{name!r} ({error})",
            "Check the spelling, and that the module is on the Python path.",
        ) from error
    if not (inspect.isclass(value) and issubclass(value, base)):
        package = base.__module__.rpartition(".")[0]
        raise invalid(
            caller,
            f"name a subclass of `{base.__name__}`",
            f"{name!r}, which is {value!r}",
            f"Inherit from `{package}.{base.__name__}`.",
        )
    return value


def needed_settings(named: type[Any]) -> list[str]:
    """Return the arguments without which it cannot be built."""
    parameters = inspect.signature(named).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]
