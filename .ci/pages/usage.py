"""Has the reference show the "Usage" of a docstring as code."""

from __future__ import annotations

import re
from textwrap import dedent, indent
from typing import Any

from griffe import Extension

_USAGE = re.compile(r"^Usage:\n((?:[ ]{4}.*\n?|\n(?=[ ]{4}))+)", re.MULTILINE)


class UsageAsCode(Extension):
    """Fences the lines under "Usage:", which would be read as prose."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of an object as it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = _USAGE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    code = dedent(found[1]).strip("\n")
    return "Usage:\n" + indent(f"```python\n{code}\n```", "    ", lambda line: True) + "\n"
