"""Lengths of real text: the functions of the standard library, in tokens of four characters."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import numpy as np


def function_lengths(num_files: int = 200) -> np.ndarray:
    """Return the lengths of all functions in some files, in the order they stand in."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
    found: list[int] = []
    for file in files:
        source = file.read_text("utf-8", errors="replace")
        functions = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef))
        texts = (ast.get_source_segment(source, one) or "" for one in functions)
        found.extend(len(text) // 4 + 1 for text in texts)
    return np.array(found, np.int64)
