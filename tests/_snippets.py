"""The code printed in a page, and what it says when it is run as it stands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from evenstep.testing import run_workers

ROOT = Path(__file__).parents[1]


def blocks(page, language):
    """The fenced blocks of a page in ``language``, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.M)


def promised(code):
    """What a block says it prints: its comments that take a whole line."""
    return [line[2:] for line in code.splitlines() if line.startswith("# ")]


def printed(code):
    """What a block prints; one that trains does so as two processes, and rank 0 is heard."""
    if "evenstep.tensorflow" in code or "evenstep.lightning" in code:
        return alone(code).splitlines()
    said = run_workers(2, hear, code)[0] if "evenstep.torch" in code else hear(0, code)
    return said.splitlines()


def alone(code):
    """What ``code`` prints in a process of its own: the framework stays out of this one."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hear(rank, code):
    """Run ``code`` and return its standard output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {"__name__": "__main__"})
    return said.getvalue()
