"""A slow link in a real cluster, named by what the kernel counts of gloo's own connections."""

import pytest

from benchmarks.links import named, run

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.usefixtures("a_lab_can_be_made")]


def test_a_watched_run_names_the_slow_link_and_a_healthy_one_none():
    """Four hosts at 200 Mbit/s, one of which sends at 30: it is its link to the rank before it."""
    assert [sender for *_, sender in named(run("egress", 4, [2], 30.0, 10.0), 4)] == [2]
    assert named(run("healthy", 4, [0], 0.0, 10.0), 4) == []
