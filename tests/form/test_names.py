"""One name, one meaning: no class and no file of another room is called the same."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "evenstep"

SHARED = {
    "__init__.py",
    "__main__.py",
    "_protocols.py",  # what a room asks of the rooms above it
    "_base.py",  # the interface of a room with one leaf file for each algorithm
    "Balancer",  # the public face in each framework
    "Runtime",  # its settings, likewise
}


@cache
def found_twice():
    """Names of public classes, and of files, that stand in more than one folder."""
    classes, files = defaultdict(set), defaultdict(set)
    for file in SOURCE.rglob("*.py"):
        files[file.name].add(file.parent)
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].add(file.parent)
    return [{name for name in found if len(found[name]) > 1} for found in (classes, files)]


def test_a_class_has_a_name_of_its_own():
    """A reader who searches for a class finds one."""
    classes, _ = found_twice()

    assert classes - SHARED == set()


def test_a_file_has_a_name_of_its_own():
    """A traceback or an editor's tab is enough to tell the room."""
    _, files = found_twice()

    assert files - SHARED == set()
