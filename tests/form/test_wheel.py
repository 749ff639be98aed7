"""What is built is what a user installs: it works with the core's needs, and with every extra."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from hatch_build import absolute

ROOT = Path(__file__).parents[2]


def run(*command, check=True):
    """Run a command away from this tree, and give what it said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, text=True, capture_output=True, env=env)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree, built with the tools at hand: no index is asked."""
    return built("--wheel", ROOT, tmp_path_factory.mktemp("dist"))


def built(kind, tree, folder):
    """What `build` makes of a tree, in ``folder``."""
    run(sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", folder, tree)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory):
    """The programs of an environment that holds the wheel, numpy and msgspec, and nothing else."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    lend(site, "numpy")
    lend(site, "msgspec")
    # pip finds both there already; without them, the missing index would end this.
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", wheel)
    return folder / "bin"


def lend(site, name):
    """Link a package's own folders into ``site``, so that the suite runs without a network."""
    home = Path(importlib.util.find_spec(name).origin).parents[1]
    tops = {file.parts[0] for file in importlib.metadata.files(name) if file.parts[0] != ".."}
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


def test_it_installs_and_decides_with_its_dependencies_alone(clean):
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


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The tree in the sdist."""
    sdist = built("--sdist", ROOT, tmp_path_factory.mktemp("sdist"))
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def files_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_the_sdist_gives_the_same_wheel(unpacked, wheel, tmp_path):
    """Down to the last byte of each file, without git or anything else around."""
    assert files_in(built("--wheel", unpacked, tmp_path)) == files_in(wheel)


@pytest.mark.slow
def test_the_sdist_holds_what_its_own_tests_and_verbs_read(unpacked):
    """Docs, tests, settings and licence: `make test` works in it as in a clone."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True).stdout
    if not names:
        pytest.skip("this tree is no clone, so that its files are not known")
    missing = {name for name in names.splitlines() if not (unpacked / name).exists()}

    assert missing <= {".gitignore"}
    assert os.access(unpacked / ".ci" / "setup", os.X_OK)


EXTRAS = sorted(
    tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
)


def lend_all(site):
    """Link everything that this environment has into ``site``, but evenstep itself."""
    home = Path(importlib.util.find_spec("numpy").origin).parents[1]
    for path in home.iterdir():
        if "evenstep" not in path.name and path.suffix != ".pth":
            (site / path.name).symlink_to(path)


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["index", "clone"])
def test_extras_install_and_work(origin, wheel, tmp_path):
    """By name from an index, and by path from a clone: extras that name others of ours too."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    lend_all(site)
    programs = tmp_path / "env" / "bin"
    extras = f"[{','.join(extra for extra in EXTRAS if extra not in NOT_HERE)}]"
    what = {
        "index": ["--find-links", wheel.parent, f"evenstep{extras}"],
        "clone": ["--no-build-isolation", "--editable", f"{ROOT}{extras}"],
    }[origin]
    python = programs / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", *what)
    run(python, "-I", "-c", "import evenstep.torch, evenstep.huggingface, evenstep.testing")
    said = run(programs / "evenstep", "plan", "--speeds", "3,1", "--global-batch-size", "64").stdout

    assert re.search(r"balanced +16 s +4 +2\.00", said)


# `tensorflow-cpu` stands in for `tensorflow` where tests run, and a browser is no package.
NOT_HERE = ("tensorflow", "examples", "browser")


@pytest.mark.slow
def test_the_wheel_names_every_extra(wheel):
    """An extra that it did not name would be ignored with a warning."""
    (metadata,) = (text for name, text in files_in(wheel).items() if name.endswith("/METADATA"))

    assert re.findall(r"^Provides-Extra: (.*)$", metadata.decode(), re.M) == EXTRAS
