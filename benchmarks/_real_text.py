"""Real text: the functions of the standard library, in tokens of four characters."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import numpy as np


def functions(num_files: int = 200) -> list[str]:
    """Return the source of all functions in some files, in the order they stand in."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
    found: list[str] = []
    for file in files:
        source = file.read_text("utf-8", errors="replace")
        lines = source.split("\n")  # `ast.get_source_segment` splits the file for each function
        parts = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef))
        found.extend("\n".join(lines[one.lineno - 1 : one.end_lineno]).lstrip() for one in parts)
    return found


def tokens_of(text: str, longest: int, vocabulary: int) -> np.ndarray:
    """Return a function's first tokens, ``(min(len(text) // 4 + 1, longest),)``."""
    size = 4 * min(len(text) // 4 + 1, longest)
    letters = text[:size].encode("latin-1", errors="replace").ljust(size, b"\0")
    return np.frombuffer(letters, "<u4").astype(np.int64) % vocabulary
