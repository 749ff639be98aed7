"""The page on choosing a policy keeps up with the policies, and its own one is certified."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep import policies

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to-choose-a-policy.md"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
EXPORTED = [
    public
    for public in policies.__all__
    if inspect.isclass(getattr(policies, public)) and public != "AbstractPolicy"
]


@pytest.mark.parametrize("public", EXPORTED)
def test_every_policy_has_a_row(public):
    """One each, with its name and when to take and to leave it."""
    rows = [
        line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| `{public}`")
    ]
    name = getattr(policies, public).name

    assert len(rows) == 1
    assert rows[0].count("|") == 6
    assert f"`{name}`" in rows[0] or "wrapper" in rows[0]


def own_policies():
    """The blocks of code in all pages that define a policy."""
    for page in sorted(PAGES):
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.S | re.M):
            if re.search(r"^class \w+\(AbstractPolicy", code, re.M):
                yield pytest.param(code, id=page.name)


@pytest.mark.parametrize("code", list(own_policies()))
def test_every_policy_in_the_docs_keeps_its_promises(code, tmp_path):
    """As its reader would certify it: with the tests that stand beside it."""
    (tmp_path / "test_own.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"]
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout
    assert "PolicyContract, AdaptivePolicyContract" in code
    assert re.search(r"^17 passed", done.stdout, re.M)


def test_the_template_is_the_policy_of_the_docs():
    """What is to be copied is what was read."""
    (own,) = list(own_policies())

    assert own.values[0] == (ROOT / "examples" / "own_policy.py").read_text("utf-8")
