"""`Trainer` by the lengths of padded or packed samples trains what it trains in one process."""

from __future__ import annotations

import pytest

from evenstep.testing import run_workers
from evenstep.torch import Cost

from .._tiers import Groups, slow_but
from .length_runs import BATCH_SIZE, CASES, alone, by_length
from .lengths import packing
from .small import distance

pytestmark = pytest.mark.cluster
FIRST = (("causal, a column of lists", 2),)
RUNS = [*FIRST, *((name, 3) for name in CASES)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each case, as some ranks train it, and as one process does."""

    def run(wanted):
        folder = str(tmp_path_factory.mktemp("lengths"))
        theirs = run_workers(1, alone, folder, sorted({name for name, _ in wanted}))[0]
        found = {}
        for size in sorted({size for _, size in wanted}):
            names = [name for name, other in wanted if other == size]
            ranks = run_workers(size, by_length, folder, names, size)
            found |= {
                (name, size): ([rank[name] for rank in ranks], theirs[name]) for name in names
            }
        return found

    return Groups(FIRST, RUNS, run)


@pytest.mark.parametrize(("name", "world_size"), slow_but(FIRST, RUNS))
def test_by_length_it_ends_where_one_process_ends(runs, name, world_size):
    """Parameters and every loss that is logged, whoever computes which samples."""
    of_ranks, theirs = runs[name, world_size]
    ours = of_ranks[0][0]

    assert distance(ours.parameters, theirs.parameters) <= 1e-9
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-9)
    assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-9)


@pytest.mark.parametrize(("name", "world_size"), slow_but(FIRST, RUNS))
def test_ranks_have_unlike_numbers_of_samples(runs, name, world_size):
    """Of the same global batches; and transformers' collators are seen to pad.

    Where lengths are not known beforehand, it is the times that decide whether numbers are unlike.
    """
    of_ranks, _ = runs[name, world_size]
    case, cost = CASES[name]
    steps = list(zip(*[counts for _, counts, _ in of_ranks], strict=True))

    assert {padded for _, _, padded in of_ranks} == {case.collator is not packing or cost is None}
    assert {sum(step) for step in steps} <= {BATCH_SIZE, 50 % BATCH_SIZE}
    if not (isinstance(cost, Cost) and cost.from_batch is not None):
        assert any(len(set(step)) > 1 for step in steps)
