"""The examples run as their first lines say, and end where their plain twins end."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest

from .._aborts import run

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("hf_trainer", "accelerate_loop")


def changed(name):
    """Lines of the balanced script that the plain one has not, and the other way round."""
    plain, balanced = (
        (EXAMPLES / file).read_text(encoding="utf-8").splitlines()
        for file in (f"{name}_plain.py", f"{name}.py")
    )
    diff = list(difflib.unified_diff(plain, balanced, lineterm=""))[2:]
    lines = [line for line in diff if line[1:].strip()]
    return [[line[1:] for line in lines if line.startswith(sign)] for sign in "+-"]


def printed(name, folder):
    """What two processes print that run an example, in a folder of their own."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"),
        "--nproc-per-node=2",
        str(EXAMPLES / name),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder),
    }
    result = run(command, timeout=150, env=environment, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_balancing_takes_at_most_five_lines(name):
    """Added lines, those in the place of another included; nothing is only taken away."""
    added, removed = changed(name)

    assert 2 <= len(added) <= 5
    assert len(removed) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_these_lines(name):
    """The diffs on the page are those between the examples."""
    page = (EXAMPLES.parent / "docs" / "huggingface.md").read_text(encoding="utf-8")
    shown = [block.splitlines() for block in re.findall(r"```diff\n(.*?)```", page, re.DOTALL)]
    added, removed = changed(name)

    assert sorted([*(f"+{line}" for line in added), *(f"-{line}" for line in removed)]) in [
        sorted(block) for block in shown
    ]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(("name", "rounding"), [*zip(NAMES, (0.005, 1.0), strict=True)])
def test_the_balanced_twin_ends_where_the_plain_one_does(name, rounding, tmp_path):
    """Same steps and samples, same result up to rounding."""
    plain, balanced = (
        [
            float(number)
            for number in re.search(r"(\d+) .*: ([\d.]+)", text.splitlines()[-1]).groups()
        ]
        for text in (printed(f"{name}_plain.py", tmp_path), printed(f"{name}.py", tmp_path))
    )

    assert balanced[0] == plain[0]
    assert balanced[1] == pytest.approx(plain[1], abs=rounding)
