"""Each benchmark runs in short: it comes to its end, and says in JSON what it found.

No figure is asserted: a busy machine misses bars, and a short run says little of them.
"""

import json
import subprocess
import sys

import pytest

from benchmarks._evidence import LONG

from .._snippets import ROOT

FILES = (ROOT / "benchmarks").glob("[a-z]*.py")
FOLDERS = (ROOT / "benchmarks").glob("[a-z]*/__main__.py")
NAMES = sorted([path.stem for path in FILES] + [path.parent.name for path in FOLDERS])
LEFT_OUT = {
    "first_hour": "installs from an index, and types `make test` into a clone",
    "arena": "80 s in short, and `test_arena_cells.py` runs its smallest race",
    "network": "a lab of shaped links takes root and minutes",
    "claims": "100 s and more in short",
    "compiled": "150 s and more in short: each case is compiled",
    "faults": "100 s in short, and `tests/cluster/test_faults.py` runs cells of it",
    "fuzz": "80 s and more in short",
    "gpu": "180 s in short, and `tests/benchmarks/test_gpu.py` runs all of it",
    "kills": "80 s and more in short, and `tests/cluster/test_torchrun.py` kills as well",
    "matrix": "70 s in short, and `tests/torch/test_matrix.py` runs its combinations",
    "optimizer_shares": "120 s in short: processes whose peaks of memory are read",
    "regret": "110 s in short, and `tests/sim` simulates as well",
    "rivals": "installs from an index, and `test_rivals.py` trains with what is at hand",
    "servers": "a lab of shaped links takes root and minutes",
    "ray_train": "150 s in short, and `tests/cluster/test_ray.py` runs the same",
    "tensorflow": "70 s in short",
}
"""What takes more than a minute in short, or more than this machine: `make evidence` runs it."""
SHORTER = {
    "soak": ("--steps", "500"),
}
"""What is shorter than ``--quick`` alone."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in LEFT_OUT])
def test_a_benchmark_says_what_it_found(name):
    """One JSON object on standard output; the status is 1 where a bar was missed, else 0."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
    short = SHORTER.get(name, ("--quick",))
    done = subprocess.run([*command, *short], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode in (0, 1), done.stderr[-4000:]
    told = json.loads(done.stdout)

    assert told.keys() == {"machine", "rows"}
    assert told["machine"].keys() == {"python", "system", "cores"}
    assert told["rows"]
    assert all(row.keys() == {"what", "bar", "measured", "met"} for row in told["rows"])
    assert {row["met"] for row in told["rows"]} <= {True, False, None}
    assert done.returncode == any(row["met"] is False for row in told["rows"])


def test_what_is_left_out_is_evidence():
    """With a reason; and no benchmark is listed that is gone."""
    assert LEFT_OUT.keys() <= LONG.keys() <= {*NAMES, "_results"}  # which repeats what others found
    assert SHORTER.keys() <= set(NAMES) - LEFT_OUT.keys()
    assert all(reason.strip() for reason in LEFT_OUT.values())
