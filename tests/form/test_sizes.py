"""Files and functions stay short enough to be read in one go."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples")
FILE_LINES, FILE_LIMIT = 350, 500
FUNCTION_LINES, FUNCTION_LIMIT = 60, 80

# What is longer than it should be, and why it may be: "path" or "path function" -> the reason.
LONGER = {
    "src/evenstep/_exchange/_message_kinds.py": "every message in one place; half is docstrings",
    "src/evenstep/events.py": "every fact in one place; half of it is docstrings",
    "src/evenstep/torch/_balancer.py": "the public face in one place; half of it is docstrings",
    "src/evenstep/torch/_data/loaders/_base.py": "what all loaders do alike, and their loops",
    "src/evenstep/torch/_step/_conductor.py": "one rank's way through a step in one place",
    "tests/huggingface/accelerate_runs.py": "every loop of Accelerate beside its plain twin",
    "tests/huggingface/trainer_runs.py": "every training of Trainer beside its plain twin",
    "tests/torch/compared_parts.py": "every part of which ranks may differ",
    "tests/torch/test_cost.py": "every promise of plans by cost",
}


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


def longer_than(for_file, for_function):
    """What has more lines than its kind may have."""
    return {
        name: lines
        for name, lines in measured().items()
        if lines > (for_function if " " in name else for_file)
    }


def test_nothing_is_past_the_limit():
    """No file has more than 500 lines, no function more than 80, whatever the reason."""
    assert longer_than(FILE_LIMIT, FUNCTION_LIMIT) == {}


def test_what_is_long_has_its_reason_written_down():
    """A file past 350 lines or a function past 60 is listed, and the list holds no old entries."""
    assert sorted(longer_than(FILE_LINES, FUNCTION_LINES)) == sorted(LONGER)
    assert all(reason.strip() for reason in LONGER.values())
