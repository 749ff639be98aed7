"""The ``evenstep`` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; an extra that is missing ends it with the remedy."""
    from .._render import spare_strictness

    try:
        from ._app import app
    except ModuleNotFoundError as error:
        from .._install import install_line

        sys.exit(f"`evenstep` on the command line needs {error.name}: `{install_line('cli')}`.")
    spare_strictness(sys.stdout)
    app()
