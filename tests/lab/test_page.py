"""The page about the lab shows what really happens. Needs root."""

import pytest

from tests._snippets import ROOT, blocks, printed, promised


@pytest.mark.cluster
@pytest.mark.usefixtures("a_lab_can_be_made")
def test_the_example_prints_its_comments():
    """The blocks that need root are kept apart from those that any machine runs."""
    (code,) = blocks(ROOT / "docs" / "lab.md", "py")

    assert printed(code) == promised(code)
