"""The picture is drawn from any pair of runs."""

from __future__ import annotations

import pytest

from evenstep.demo._picture import save_picture
from evenstep.demo._summary import summarise

from .recordings import recording


@pytest.mark.parametrize("speeds", [(1.0, 0.5, 1 / 3, 1 / 6), (1.0, 0.25), (1.0, 0.5) * 5])
def test_any_number_of_workers_can_be_drawn(tmp_path, speeds):
    """A PNG large enough for a page; more workers than colours take them again."""
    equal = recording([(24,) * len(speeds)], speeds)
    path = tmp_path / "demo.png"
    summary = summarise(equal, equal, speeds=speeds)
    save_picture(path, summary, equal=equal, balanced=equal, speeds=speeds)

    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 50_000
