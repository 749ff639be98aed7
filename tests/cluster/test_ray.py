"""Inside Ray Train: its published example, the page's code, Ray Data, a kill, nodes that change.

On local clusters of Ray's, with gloo, each in a process of its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import chain

import pytest

from .ray_runs import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(600),  # on a busy machine: each start of a worker takes 4 s of a core
    pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install 'ray[train]'"),
]


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """What comes of Ray's example with the page's lines, of the page's code, and of Ray Data."""
    return run("steady", tmp_path_factory.mktemp("steady"))


def test_rays_example_takes_five_lines_at_most(steady):
    """And the page's diff fits the example that is installed."""
    assert len(steady["lines"]) <= 5


def test_rays_example_ends_where_one_process_ends(steady):
    """In fp64, two epochs of unequal batches: the parameters of plain training, on all workers."""
    assert steady["difference"] <= 1e-9
    assert {sum(sizes) for sizes in steady["sizes"]} == {42}
    assert any(len(set(sizes)) == 3 for sizes in steady["sizes"])


def test_the_page_prints_its_comments(steady):
    """Its training function, started with Ray as it is on the page."""
    assert steady["said"]
    for said, promised in steady["said"]:
        assert said == promised


def test_rows_of_ray_data_count_once(steady):
    """Two epochs of rows that all workers read, resumed in the second one."""
    steps = [rank["trained"] for rank in steady["rows"]]
    together = [sorted(chain(*parts)) for parts in zip(*steps, strict=True)]

    assert together == 2 * [list(range(first, first + 12)) for first in range(0, 60, 12)]
    assert any(len(one) != len(other) for one, other in zip(*steps, strict=True))


def test_a_shard_itself_is_refused_with_the_remedy(steady):
    """It is no `DataLoader`; the page says how to make one of it."""
    for rank in steady["rows"]:
        assert "docs/recipes/ray.md" in rank["refused"]


def test_a_killed_worker_and_nodes_that_change_leave_no_trace(tmp_path):
    """Of 2 workers one is killed; then a node comes; then it is lost: as in plain training."""
    found = run("elastic", tmp_path)

    assert found["worlds"] == [2, 2, 3, 2]
    assert found["difference"] <= 1e-9
    assert found["same_samples"]
    assert found["each_once"]
