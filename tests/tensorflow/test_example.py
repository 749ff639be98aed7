"""The example runs as its first lines say, and ends where its plain twin ends."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys

import pytest

from .clusters import LAUNCHER, ROOT, environment

EXAMPLES = ROOT / "examples"


def changed():
    """Lines of the balanced script that the plain one has not, and the other way round."""
    plain, balanced = (
        (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        for name in ("keras_digits_plain.py", "keras_digits.py")
    )
    diff = list(difflib.unified_diff(plain, balanced, lineterm=""))[2:]
    lines = [line for line in diff if line[1:].strip()]
    return [[line for line in lines if line.startswith(sign)] for sign in "+-"]


def test_balancing_takes_at_most_five_lines():
    """Added lines, those in the place of another included; nothing is only taken away."""
    added, removed = changed()

    assert 2 <= len(added) <= 5
    assert len(removed) <= len(added)


def test_the_page_shows_these_lines():
    """The diff on the page is the one between the examples."""
    page = (ROOT / "docs" / "tensorflow.md").read_text(encoding="utf-8")
    shown, _ = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)  # the second is the tutorial's
    added, removed = changed()

    assert sorted(shown.splitlines()) == sorted([*added, *removed])


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_the_balanced_twin_ends_where_the_plain_one_does(tmp_path):
    """Three workers of unlike speeds train what one process trains, up to rounding."""
    commands = [[EXAMPLES / "keras_digits_plain.py"], [LAUNCHER, "3", EXAMPLES / "keras_digits.py"]]
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=tmp_path,
        )
        for command in commands
    ]
    said = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors[-3000:]
    plain, balanced = (
        [float(number) for number in re.search(r": ([\d.]+), ([\d.]+) %", out).groups()]
        for out, _ in said
    )

    assert balanced[0] == pytest.approx(plain[0], abs=0.003)
    assert balanced[1] == pytest.approx(plain[1], abs=0.5)
    assert "samples/s" in said[1][1] or "step" in said[1][1]  # the chief's line for people
