"""Which rivals there are, and the environment that each gets: a virtual one with pip's packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks._cells import anonymous
from benchmarks._common import progress
from benchmarks.rivals._task import GLOBAL_BATCH_SIZE


@dataclass(frozen=True)
class Rival:
    """One way to train on workers of different speeds.

    Attributes:
        script: trains one worker.
        packages: what pip installs besides torch; none: the environment at hand has all of it.
        clone: a repository that no package index has, by its folder under ``--clones``.
        num_train: training samples.
        global_batch_size: samples of an update.
        is_timed: whether its seconds are compared. It takes no part in the others' rounds if not.
    """

    script: str
    packages: tuple[str, ...] = ()
    clone: str | None = None
    num_train: int = 1280
    global_batch_size: int = GLOBAL_BATCH_SIZE
    is_timed: bool = True


DBS = "Dynamic_Load_Balance_DistributedDNN"
RIVALS: Mapping[str, Rival] = {
    "ddp": Rival("_ddp_script.py"),
    "evenstep": Rival("_evenstep_script.py"),
    "torchft": Rival("_torchft_script.py", packages=("torchft",)),
    # It imports `requests` and `pkg_resources`, and tells pip of neither.
    "adaptdl": Rival("_adaptdl_script.py", packages=("adaptdl",), is_timed=False),
    "adaptdl-completed": Rival(
        "_adaptdl_script.py", packages=("adaptdl", "requests", "setuptools==80.9.0")
    ),
    "hivemind": Rival("_hivemind_script.py", packages=("hivemind",)),
    "hivemind-2048": Rival("_hivemind_script.py", packages=("hivemind",), global_batch_size=2048),
    # With 1,280 samples some of its rounds hang. 4.8 batches of samples make five steps an epoch
    # on every rank, whatever the split: see "Rivals of today" in docs/results.md.
    "dbs-1228": Rival("_dbs_script.py", clone=DBS, num_train=1228),
    "dbs": Rival("_dbs_script.py", clone=DBS, is_timed=False),
}


class NotInstalledError(Exception):
    """A rival cannot be had; the text says why."""


def python_of(name: str, into: Path) -> str:
    """Return the Python that has a rival's packages; its environment is made where it is missing.

    It gets the torch that is at hand, in the same build. A rival that wants another one is not
    installed: it would not be compared on equal terms, and other builds take gigabytes.

    Raises:
        NotInstalledError: pip failed; the text is the end of what it said.
    """
    packages = RIVALS[name].packages
    if not packages:
        return sys.executable
    home = into / "-".join(packages)
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists():
        wanted = [f"torch=={torch.__version__}", *packages]
        progress(f"{name}: pip install {' '.join(wanted)}")
        _checked(sys.executable, "-m", "venv", "--clear", str(home))
        _checked(str(python), "-m", "pip", "install", "--quiet", *wanted)
        ready.touch()
    return str(python)


def versions_of(name: str, python: str, clones: Path | None) -> dict[str, str]:
    """Return what is compared: releases of its packages, or the commit of a clone."""
    rival = RIVALS[name]
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    packages = ("torch", *(package.partition("==")[0] for package in rival.packages))
    versions = dict(zip(packages, _checked(python, "-c", code, *packages).split(), strict=True))
    if rival.clone and clones:
        versions[rival.clone] = _checked(
            "git", "-C", str(clones / rival.clone), "rev-parse", "HEAD"
        )
    return versions


def _checked(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise NotInstalledError(f"`{anonymous(' '.join(words[1:]))}` said:\n{anonymous(last)}")
    return done.stdout.strip()
