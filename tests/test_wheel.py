"""What is built is what a user installs, and it works with numpy alone."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from hatch_build import absolute

ROOT = Path(__file__).parents[1]


def run(*command, check=True):
    """Run a command away from this tree, and give what it said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, text=True, capture_output=True, env=env)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built with the tools at hand: no index is asked."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """The programs of an environment that holds the wheel and numpy, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    lend_numpy(site)
    # pip finds numpy there already; without it, the missing index would end this.
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", wheel)
    return folder / "bin"


def lend_numpy(site):
    """Link numpy's own folders into ``site``, so that the suite runs without a network."""
    home = Path(importlib.util.find_spec("numpy").origin).parents[1]
    tops = {file.parts[0] for file in importlib.metadata.files("numpy") if file.parts[0] != ".."}
    for top in tops:
        (site / top).symlink_to(home / top)


def test_it_holds_the_package_and_nothing_else(wheel):
    """Type marker, licences, README and the files of a page are in, tests and benchmarks not."""
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"{info}/METADATA").decode()

    assert {name.split("/")[0] for name in names} == {"evenstep", info}
    assert "evenstep/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    assets = {name.rpartition("/")[2] for name in names if "/_report/assets/" in name}
    assert assets == {path.name for path in (ROOT / "src/evenstep/_report/assets").iterdir()}
    assert f"{info}/licenses/src/evenstep/_report/assets/uPlot-LICENSE" in names
    assert "Description-Content-Type: text/markdown" in metadata
    assert metadata.count("\n# evenstep\n") == 1


def test_the_readme_of_the_package_index_links_into_the_repository():
    """Pictures lead to files, other links to pages; those with an address stay as they are."""
    text = (ROOT / "README.md").read_text("utf-8") + "[other](https://example.org/page)"
    links = re.findall(r"\]\(([^)\s]+)\)", absolute(text, "https://example.org/evenstep"))

    assert [link for link in links if not link.startswith("https://example.org/")] == []
    assert "https://example.org/evenstep/raw/main/docs/images/demo.png" in links
    assert "https://example.org/evenstep/blob/main/docs/limits.md" in links
    assert links[-1] == "https://example.org/page"


def test_it_installs_and_decides_with_numpy_alone(clean):
    """A clean environment imports every pure layer and gets an answer from the solver."""
    script = """
import numpy as np
import evenstep, evenstep._planner, evenstep.events, evenstep.solve, evenstep.policies
import evenstep.prediction, evenstep._telemetry, evenstep._report, evenstep.timemodels
times = evenstep.AffineTime(intercept_s=np.zeros(2), slope_s=np.array([0.01, 0.03]))
print(evenstep.__version__, evenstep.allocate(times, evenstep.Cluster(2, 96)).tolist())
"""
    said = run(clean / "python", "-I", "-c", script).stdout.strip()

    assert said == f"{importlib.import_module('evenstep').__version__} [72, 24]"


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["python", "-I", "-c", "import evenstep.torch"], "torch"),
        (["python", "-I", "-c", "import evenstep.tensorflow"], "tensorflow"),
        (["python", "-I", "-c", "import evenstep.testing"], "testing"),
        (["evenstep", "--help"], "cli"),
    ],
    ids=["torch", "tensorflow", "testing", "cli"],
)
def test_a_missing_extra_is_named(clean, wheel, command, extra):
    """The one command that brings a missing part is printed, with where evenstep came from."""
    done = run(clean / command[0], *command[1:], check=False)

    assert done.returncode != 0
    assert f'`pip install "{wheel}[{extra}]"`' in done.stderr
