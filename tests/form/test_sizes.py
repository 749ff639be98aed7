"""Files and functions stay short enough to be read in one go."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples")
FILE_LINES, FUNCTION_LINES = 600, 60


@cache
def measured():
    """Lines of every file, as "path", and of every function, as "path name"."""
    lines = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            text = file.read_text(encoding="utf-8")
            lines[path] = len(text.splitlines())
            if lines[path] <= FUNCTION_LINES:
                continue  # no function in it is longer; to parse all files takes seconds
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = node.end_lineno - node.lineno + 1
                    key = f"{path} {node.name}"
                    lines[key] = max(length, lines.get(key, 0))
    return lines


def test_nothing_is_past_the_limit():
    """No file has more than 600 lines, no function more than 60."""
    limits = {name: FUNCTION_LINES if " " in name else FILE_LINES for name in measured()}

    assert {name: n for name, n in measured().items() if n > limits[name]} == {}
