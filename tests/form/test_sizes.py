"""Files and functions stay short enough to be read in one go, and the whole does not grow."""

import ast
import re
import subprocess
import sys
import tokenize
from functools import cache
from io import StringIO
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


BUDGETS = {  # They only fall: lower one when the tree has become smaller.
    "tokens of src": 353_318,
    "code lines of src": 39_074,
    "files of src": 260,
    "classes of src": 518,
    "modules that a training process loads": 147,
    "kinds of messages": 28,
    "words of all pages": 38_822,
}
SLACK = 0.01
COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
MESSAGES = ROOT / "src" / "evenstep" / "_exchange" / "_message_kinds.py"


def tokens_and_lines(text):
    """Count the tokens of a module, and the lines they are on, without docstrings and comments."""
    spoken = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            spoken.update(range(node.lineno, node.end_lineno + 1))
    count, lines = 0, set()
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type in COUNTED and token.start[0] not in spoken:
            count += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return count, len(lines)


def weights():
    """Return what each budget is of."""
    texts = [file.read_text("utf-8") for file in sorted((ROOT / "src").rglob("*.py"))]
    tokens, lines = map(sum, zip(*map(tokens_and_lines, texts), strict=True))
    count = "import sys, evenstep.torch; print(sum(n.startswith('evenstep') for n in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", count], check=True, capture_output=True)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    classes = [re.findall(r"^ *class \w+", text, re.M) for text in texts]
    return {
        "tokens of src": tokens,
        "code lines of src": lines,
        "files of src": len(texts),
        "classes of src": sum(map(len, classes)),
        "modules that a training process loads": int(loaded.stdout),
        "kinds of messages": len(re.findall(r"\(Message\):", MESSAGES.read_text("utf-8"))),
        "words of all pages": sum(len(page.read_text("utf-8").split()) for page in pages),
    }


def test_the_whole_is_within_its_budgets():
    """And no budget is left far above what is there, or it would not be one."""
    found = weights()

    assert {name: n for name, n in found.items() if n > BUDGETS[name]} == {}
    assert {name: n for name, n in found.items() if n < (1 - SLACK) * BUDGETS[name]} == {}
