"""Which versions this process runs."""

from __future__ import annotations

import platform
import sys

from .. import __version__

_OF_WEIGHT = ("torch", "tensorflow", "numpy")


def versions_here() -> tuple[str, ...]:
    """Return evenstep, Python and the frameworks that are loaded, such as ``"torch 2.13.0"``."""
    loaded = [(name, sys.modules.get(name)) for name in _OF_WEIGHT]
    others = [f"{name} {module.__version__}" for name, module in loaded if module is not None]
    return f"evenstep {__version__}", f"Python {platform.python_version()}", *others
