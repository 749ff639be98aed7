"""The examples run as their first lines say."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest

from .._aborts import run
from .._ranks import printed

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(command):
    """What a command prints, on one thread per process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = run(command, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def torchrun(name, num_workers):
    """What an example prints when several processes run it."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"),
        f"--nproc-per-node={num_workers}",
        str(EXAMPLES / name),
    ]
    return output_of(command)


def test_the_diff_is_what_lies_between_the_two_scripts():
    """``plain-to-balanced.diff`` shows the change that a user makes, and no other."""
    plain, balanced = (
        (EXAMPLES / name).read_text(encoding="utf-8").splitlines(keepends=True)
        for name in ("plain.py", "balanced.py")
    )
    diff = "".join(difflib.unified_diff(plain, balanced, "plain.py", "balanced.py"))

    assert (EXAMPLES / "plain-to-balanced.diff").read_text(encoding="utf-8") == diff


def test_balancing_takes_three_lines():
    """Nothing is taken away, and besides blank lines three are added."""
    diff = (EXAMPLES / "plain-to-balanced.diff").read_text(encoding="utf-8").splitlines()[2:]

    assert not [line for line in diff if line.startswith("-")]
    assert len([line for line in diff if line.startswith("+") and line != "+"]) == 3


@pytest.mark.slow
@pytest.mark.cluster
def test_the_balanced_twin_ends_where_the_plain_script_does():
    """Same steps, same samples, same loss in the end, up to rounding."""
    losses = []
    for text in (printed(EXAMPLES / "plain.py"), torchrun("balanced.py", 2)):
        assert "epoch 4: 60 steps" in text
        losses.append(float(re.search(r"all samples: ([\d.]+)", text)[1]))

    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.slow
@pytest.mark.cluster
def test_digits_are_learnt_on_unlike_workers():
    """The slower a worker, the fewer images it is given; the network still learns."""
    last = torchrun("digits_cnn.py", 3).strip().splitlines()[-1]
    accuracy, *sizes = re.search(r"([\d.]+)% .* sizes (\d+) \+ (\d+) \+ (\d+)", last).groups()
    fast, slower, slowest = map(int, sizes)

    assert float(accuracy) > 90
    assert fast > slower > slowest
    assert fast + slower + slowest == 96


@pytest.mark.slow
def test_digits_are_learnt_alone():
    """The same script runs with one process and no process group."""
    text = output_of([sys.executable, str(EXAMPLES / "digits_cnn.py")])

    assert "batch sizes 32" in text
