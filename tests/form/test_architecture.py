"""The walk of a step in the docs: each stop exists where it is said to be."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STOPS = re.findall(r"`([A-Za-z_.]+)` in\s+`(src/[\w/]+\.py)`", PAGE)


def names_in(tree, prefix=""):
    """Return classes, functions and methods, as ``Class.method``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield prefix + node.name
            yield from names_in(node, f"{prefix}{node.name}.")


def test_the_walk_has_a_stop_on_every_line():
    """A line without one would be checked by nothing."""
    assert len(STOPS) == len(re.findall(r"^\d+\. ", PAGE, re.M)) >= 10


@pytest.mark.parametrize(("name", "file"), STOPS, ids=[name for name, _ in STOPS])
def test_a_stop_exists(name, file):
    """Where the page says it is."""
    assert name in set(names_in(ast.parse((ROOT / file).read_text())))


def test_the_rooms_are_those_of_the_package():
    """None is missing in the picture, and none is left in it that is gone."""
    picture = PAGE.split("```text")[1].split("```")[0]
    named = set(re.findall(r"^([a-z_]+(?:   [a-z_]+)*)", picture, re.M))
    named = {room for line in named for room in line.split()}
    package = ROOT / "src" / "evenstep"
    rooms = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}

    assert rooms <= named
    assert {room for room in named - rooms if not (package / f"{room}.py").exists()} == set()
