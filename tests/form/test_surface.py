"""The public names change on purpose, and importing them changes nothing else."""

import __future__

import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from evenstep import events

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MOST_NAMES = 137
NO_USE = {"reference.md", "design.md"}
HEAVY = {"torch", "scipy", "matplotlib", "rich", "typer", "sklearn", "pytest"}
ADAPTERS = {  # whose libraries take long to import, and what they are
    "tensorflow": ("tensorflow", "keras"),
    "lightning": ("lightning.pytorch",),
    "huggingface": ("accelerate", "transformers"),
}


def public_packages():
    """Every package of the tree that has no underscore in its path, and the errors."""
    files = sorted(SOURCE.rglob("__init__.py"))
    names = [".".join(file.parent.relative_to(SOURCE).parts) for file in files]
    return [name for name in names if "._" not in name] + ["evenstep.exceptions"]


def pure_modules():
    """What the import contract keeps free of frameworks; it is written down there alone."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    name = "what decides never imports a framework"
    (contract,) = (each for each in contracts if each["name"] == name)
    return ["evenstep", *contract["source_modules"]]


@pytest.mark.parametrize("name", public_packages())
def test_all_lists_every_public_name_in_order(name):
    """Adding or losing a public name is a decision, never a side effect.

    A name may be loaded when it is asked for, and stands in the list like the others.
    """
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", [])
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and not isinstance(value, __future__._Feature)
    }

    assert listed == sorted(public | set(listed))
    assert all(hasattr(module, name) for name in listed)


def public_names():
    """Every name that a user may type, events included, as "package.name"."""
    names = [
        f"{package}.{name}"
        for package in public_packages()
        for name in getattr(importlib.import_module(package), "__all__", [])
    ]
    return names + [f"evenstep.events.{kind.__name__}" for kind in get_args(events.Event)]


def test_the_public_surface_stays_small():
    """A new name takes the place of another one, or stays private."""
    assert len(public_names()) <= MOST_NAMES


def test_every_public_name_is_used_in_a_docs_page():
    """What no page has a use for is not worth learning; the reference lists all and counts not."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in NO_USE]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    words = set(re.findall(r"\w+", text))
    names = [name for name in public_names() if name != "evenstep.cli.main"]  # the command itself

    assert [name for name in names if name.rpartition(".")[2] not in words] == []


@pytest.mark.parametrize("name", public_packages())
def test_every_public_object_says_what_it_is(name):
    """Whatever can be imported by a user carries a docstring of its own."""
    module = importlib.import_module(name)
    bare = [
        name
        for name in getattr(module, "__all__", [])
        if callable(getattr(module, name)) and not inspect.getdoc(getattr(module, name))
    ]

    assert bare == []


def test_the_pure_layers_load_nothing_heavy():
    """A policy, the solver or an event can be used where numpy and msgspec alone are installed."""
    modules = ", ".join(pure_modules())
    loaded = run(f"import sys, {modules}; print(*{{name.split('.')[0] for name in sys.modules}})")

    assert set(loaded.split()) & {*HEAVY, *ADAPTERS, "accelerate", "transformers"} == set()


@pytest.mark.parametrize(
    "adapters",
    [
        pytest.param((), id="without adapters"),
        pytest.param(tuple(ADAPTERS), marks=pytest.mark.slow, id="all"),
    ],
)
def test_importing_does_nothing(adapters):
    """No changed environment, logger, warning filter, signal, thread, start method or seed."""
    left_out = {f"evenstep.{name}" for name in ADAPTERS if name not in adapters}
    libraries = HEAVY | {library for name in adapters for library in ADAPTERS[name]}
    changed = run(
        f"""
import logging, multiprocessing, os, random, signal, sys, threading, warnings
import numpy, {", ".join(sorted(libraries))}
import torch.distributed, torch.utils.data, matplotlib.figure, rich.live

def world():
    return {{
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "root logger": [list(logging.root.handlers), logging.root.level],
        "own logger": logging.getLogger("evenstep").handlers[:],
        "warning filters": list(warnings.filters),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "threads": threading.active_count(),
        "children": multiprocessing.active_children(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "seeds": [random.getstate(), str(numpy.random.get_state()), torch.initial_seed()],
        "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "default type": torch.get_default_dtype(),
        "process group": torch.distributed.is_initialized(),
        "picture backend": matplotlib.rcParams._get("backend"),
        "exit hooks": sys.excepthook,
    }}

before = world()
import {", ".join(name for name in public_packages() if name not in left_out)}
after = world()
print(*(name for name in before if before[name] != after[name]), sep=", ")
"""
    )

    assert changed.strip() == ""


def run(script):
    """What ``script`` prints in a fresh interpreter that finds this tree."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_balancer_has_eight_settings_at_most():
    """What belongs to how a run is watched, connected and recorded stands in `Runtime`."""
    from evenstep.torch import Balancer

    assert len(inspect.signature(Balancer).parameters) <= 8
