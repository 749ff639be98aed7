"""Whoever trains past the balancer hears of it at the end, and nobody else does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.testing import run_workers

from .unused import SILENT, WARNED, warned

ROOT = Path(__file__).parents[2]
WORDS = "nothing was balanced. Use what `prepare` returns, `model, loader = balancer.prepare("


@pytest.fixture(scope="module")
def said():
    """What each of two ranks was told, by script."""
    return run_workers(2, warned)


@pytest.mark.cluster
@pytest.mark.parametrize("script", WARNED, ids=lambda script: script.__name__)
def test_ignoring_what_prepare_returned_is_said_once(said, script):
    """On one rank, with the remedy."""
    (message,), others = (rank[script.__name__] for rank in said)

    assert WORDS in message
    assert others == []


@pytest.mark.cluster
@pytest.mark.parametrize("script", SILENT, ids=lambda script: script.__name__)
def test_who_did_nothing_wrong_hears_nothing(said, script):
    """Nor does a script that an error has ended."""
    assert [rank[script.__name__] for rank in said] == [[], []]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(("name", "count"), [("ignored", 1), ("failed", 0)])
def test_a_script_that_closes_nothing_hears_of_it_at_its_end(tmp_path, name, count):
    """As most scripts do."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tests.torch.unused", name, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]

    assert [error.count("nothing was balanced") for error in errors] == [count, 0]
    assert all((rank.returncode == 0) == (name != "failed") for rank in ranks)
