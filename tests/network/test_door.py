"""Training without ``Balancer(network=...)`` imports nothing of unequal links."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.testing import run_workers

from .plain_runs import loaded_by_training

SOURCE = Path(__file__).parents[2] / "src"
DOORS = {"cli/_plan_parts.py", "torch/__init__.py", "torch/_unequal_links.py"}


def loaded(*scripts):
    """How many modules of unequal links a fresh interpreter has loaded after each script."""
    count = "print(len([name for name in sys.modules if 'evenstep.network' in name]))"
    code = "\n".join(["import sys", *(f"{script}\n{count}" for script in scripts)])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    return list(map(int, done.stdout.split()))


@pytest.mark.slow
def test_importing_what_trains_loads_none_of_it():
    """Neither the Balancer's package nor an adapter's needs it; ``Network`` is had when named."""
    training = "import evenstep, evenstep.torch, evenstep.sim, evenstep._telemetry"
    before, after = loaded(training, "from evenstep.torch import Network")

    assert before == 0
    assert after > 0


@pytest.mark.cluster
def test_a_plain_run_loads_none_of_it():
    """Two ranks in DDP, opened, trained and closed."""
    assert run_workers(2, loaded_by_training) == [[], []]


def imports_of(tree):
    """Every import of a module that is made when it runs, those inside of functions included."""
    typed = {
        id(one)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for one in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in typed:
            yield ast.unparse(node)


def test_there_is_one_door_to_it():
    """One file of training opens it, one has ``Network`` for users, and ``evenstep plan`` asks."""
    root = SOURCE / "evenstep"
    doors = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        if not file.is_relative_to(root / "network")
        and any(
            line.startswith(("from ..network", "from ...network", "from .network"))
            or "evenstep.network" in line
            for line in imports_of(ast.parse(file.read_text("utf-8")))
        )
    }

    assert doors == DOORS
