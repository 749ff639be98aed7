"""Those who have types checked strictly are told what `prepare` returns."""

import re
import subprocess
import sys
import tomllib

import pytest

from .._snippets import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
VERSIONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
OLDEST = PROJECT["requires-python"].removeprefix(">=")
RUNNING = f"3.{sys.version_info.minor}"  # which `make lint` checks


@pytest.mark.slow
def test_a_typed_script_passes_a_strict_check():
    """Models keep their class; a loader stays a `DataLoader` and has what a balanced one has."""
    command = [sys.executable, "-m", "mypy", ROOT / "tests" / "torch" / "typed.py"]
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True
    )  # with our own settings

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_versions_of_python_begin_with_the_oldest_that_installs():
    """The classifiers say what is checked: three in a row."""
    minors = [int(version.removeprefix("3.")) for version in VERSIONS]

    assert minors == [int(OLDEST.removeprefix("3.")) + n for n in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [each for each in VERSIONS if each != RUNNING])
def test_types_hold_for_the_other_pythons(version, tmp_path):
    """A name that only one of them has is seen without that Python."""
    cache = ["--cache-dir", tmp_path]
    command = [sys.executable, "-m", "mypy", "--python-version", version, *cache]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)

    assert done.returncode == 0, done.stdout + done.stderr
