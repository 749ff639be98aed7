"""Those who have types checked strictly are told what `prepare` returns."""

import subprocess
import sys

import pytest

from ._snippets import ROOT


@pytest.mark.slow
def test_a_typed_script_passes_a_strict_check():
    """Models keep their class; a loader stays a `DataLoader` and has what a balanced one has."""
    command = [sys.executable, "-m", "mypy", ROOT / "tests" / "torch" / "typed.py"]
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True
    )  # with our own settings

    assert done.returncode == 0, done.stdout + done.stderr
