"""Tests speak to public names, so that a move inside of a room breaks none of another room's."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Files that import private names, of their own room or of another. Lower them; never raise them.
MOST_FILES = 99
MOST_OF_ANOTHER_ROOM = 11


def private_names(file):
    """The names of evenstep that a file imports from behind the face of a room."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    names = {name for name in names if name.startswith("evenstep.")}
    return {name for name in names if any(p.startswith("_") for p in name.split(".")[2:])}


def room_of(file):
    """The room that a test is of: its folder, or its own name where it is in none."""
    return file.relative_to(ROOT).parts[0].removeprefix("test_").removesuffix(".py")


def test_fewer_and_fewer_files_import_private_names():
    """A test of `evenstep._wire` may; one of another room breaks whenever that room moves."""
    names = {file: private_names(file) for file in sorted(ROOT.rglob("*.py"))}
    private = {file: names[file] for file in names if names[file]}
    another = {
        file.relative_to(ROOT).as_posix(): sorted(foreign)
        for file, found in private.items()
        if (foreign := {name for name in found if name.split(".")[1].strip("_") != room_of(file)})
    }

    assert len(another) == MOST_OF_ANOTHER_ROOM, another
    assert len(private) == MOST_FILES
