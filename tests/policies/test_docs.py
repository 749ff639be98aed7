"""The page on choosing a policy keeps up with the policies."""

import inspect
from pathlib import Path

import pytest

from evenstep import policies

PAGE = Path(__file__).parents[2] / "docs" / "how-to-choose-a-policy.md"
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
