"""Training loops as people write them, under plans that change at every step, stay exact.

The loops stand in `benchmarks/_patterns/`, one function each, with where they come from.
"""

from itertools import pairwise

import pytest

from benchmarks._patterns import GLOBAL_BATCH_SIZE, PATTERNS

from .._tiers import Groups, slow_but
from .pattern_runs import EXACT, table

pytestmark = pytest.mark.cluster

MOST_REFUSED = 5
HELD = ("plain", "prefetched by one", "replayed beside the batch")
CONTROLS = ("plain", "accumulation", "gradient penalty", "many epochs over one batch")
# Each part's loss times its share is exact; divided by the number of parts it would be wrong.
WARNED = ("chunks of the batch", "splits of one size")
FIRST = [(2, name) for name in dict.fromkeys((*list(PATTERNS)[::6], *HELD))]
RUNS = [*FIRST, *((3, name) for name in PATTERNS)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of every pattern on three ranks; of one in six on two, in `make test`."""

    def run(cases):
        folder, outcomes = tmp_path_factory.mktemp("patterns"), {}
        for size in sorted({size for size, _ in cases}):
            of_size = table(size, [name for other, name in cases if other == size], folder)
            outcomes |= {(size, name): outcome for name, outcome in of_size.items()}
        return outcomes

    return Groups(FIRST, RUNS, run)


@pytest.mark.parametrize(("world_size", "name"), slow_but(FIRST, RUNS))
def test_a_loop_is_exact_or_refused_with_its_remedy(found, world_size, name):
    """Parameters at the end are those of one process: 1e-12 in fp64. Few loops may be refused."""
    outcome, remedy = found[world_size, name], PATTERNS[name].remedy

    if remedy is not None and outcome.kind == "refused":
        assert any(remedy in text for text in outcome.texts)  # others may name that rank instead
    else:
        assert outcome.kind == "exact", (outcome.error, outcome.texts)
        assert outcome.error <= EXACT


@pytest.mark.parametrize(("world_size", "name"), slow_but(FIRST, RUNS))
def test_a_loop_that_is_exact_is_not_warned_of(found, world_size, name):
    """A warning that is wrong teaches not to read those that are right."""
    outcome = found[world_size, name]

    assert outcome.kind != "exact" or name in WARNED or not outcome.warned


@pytest.mark.parametrize(("world_size", "name"), slow_but(FIRST, RUNS))
def test_each_step_had_all_samples_and_other_sizes(found, world_size, name):
    """Otherwise the comparison above would say little.

    A busy machine may fetch a whole epoch ahead under its first plan, which is uneven too.
    """
    outcome, pattern = found[world_size, name], PATTERNS[name]
    if outcome.kind == "refused" and pattern.remedy is not None:
        return
    steps = list(zip(*outcome.sizes, strict=True))
    full = [step for step in steps if sum(step) == GLOBAL_BATCH_SIZE]
    changes = sum(step != before for before, step in pairwise(full))

    assert len(full) >= len(steps) / 2
    assert max(map(sum, steps)) == GLOBAL_BATCH_SIZE
    assert any(len(set(step)) > 1 for step in full)
    assert pattern.ahead or changes >= min(2, len(full) - 1)


@pytest.mark.parametrize(
    "names", [HELD, pytest.param(tuple(PATTERNS), marks=pytest.mark.slow)], ids=("few", "all")
)
def test_sizes_that_are_kept_for_several_steps_hide_no_error(names, tmp_path):
    """Equal sizes at the beginning make the mean right where other sizes will not."""
    found = table(3, list(names), tmp_path, reading_s=0.05)
    wrong = {
        name: outcome
        for name, outcome in found.items()
        if outcome.kind != "exact"
        and not (outcome.kind == "refused" and PATTERNS[name].remedy is not None)
    }

    assert not wrong


def test_the_control_is_wrong(tmp_path):
    """The same comparison fails by far where the samples of all ranks count alike."""
    found = table(2, list(CONTROLS), tmp_path, reduction="sum")

    assert min(outcome.error for outcome in found.values()) > 0.05


def test_the_table_is_long_and_few_loops_may_be_refused():
    """What newcomers read: each loop says in a line what it is."""
    may_be_refused = [name for name, pattern in PATTERNS.items() if pattern.remedy is not None]

    assert len(PATTERNS) >= 45
    assert len(may_be_refused) <= MOST_REFUSED
    assert all(pattern.origin for pattern in PATTERNS.values())
