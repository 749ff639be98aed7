"""200 steps by cost, assigned anew at every step: none lost, none twice, on other ranks too."""

from itertools import pairwise

import pytest

from evenstep.testing import run_workers

from .cost_epochs import BATCH_SIZE, CAP, LENGTH, LOOPS, NUM_EPOCHS, NUM_STEPS, STOP_AFTER, legs
from .cost_epochs import alone as one_process

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
RUNS = [
    ((3, 2), "accumulated"),
    ((3, 2), "capped padded forwards"),
    *(((2, 3), name) for name in LOOPS),
]


def ids(value):
    return f"{value[0]} to {value[1]} ranks" if isinstance(value, tuple) else value


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Each loop begun on some ranks and gone on with on others, by both: both parts."""
    parts = {}
    for worlds in sorted({worlds for worlds, _ in RUNS}):
        names, folder = [n for w, n in RUNS if w == worlds], tmp_path_factory.mktemp("epochs")
        of_both = []
        for world_size, stop in zip(worlds, (STOP_AFTER, None), strict=True):
            rows = [(name, str(folder / name), stop) for name in names]
            ranks = run_workers(world_size, legs, world_size, rows, timeout_s=150)
            of_both.append(zip(*ranks, strict=True))
        for name, of_one in zip(names, zip(*of_both, strict=True), strict=True):
            parts[worlds, name] = of_one
    return parts


@pytest.fixture(scope="module")
def alone():
    """One process of plain torch, by batches of an optimizer step."""
    return {number: one_process(number) for number in (1, 2)}


@pytest.mark.parametrize(("worlds", "name"), RUNS, ids=ids)
def test_two_hundred_steps_are_those_of_one_process(found, alone, worlds, name):
    """Parameters within 1e-12; each step's samples once; assignments differ from step to step."""
    _check(found[worlds, name], alone[LOOPS[name].accumulated])


@pytest.mark.parametrize(
    ("worlds", "name"),
    [(worlds, name) for worlds, name in RUNS if LOOPS[name].cost.is_capped],
    ids=ids,
)
def test_no_forward_is_larger_than_its_cap(found, worlds, name):
    """In tokens, padding included, under any costs."""
    assert LENGTH.max() < max(rank.largest for part in found[worlds, name] for rank in part) <= CAP


def _check(parts, theirs):
    """That parts of a run, each of some ranks, are what one process trained in one go."""
    steps = [step for ranks in parts for step in zip(*(one.seen for one in ranks), strict=True)]
    trained = [[index for rank in step for index in rank] for step in steps]

    assert len(trained) == NUM_STEPS * NUM_EPOCHS > 200
    for first in range(0, len(trained), NUM_STEPS):
        epoch = [index for step in trained[first : first + NUM_STEPS] for index in step]
        assert sorted(epoch) == list(range(len(LENGTH)))
    for step, whole in zip(trained, theirs.seen, strict=True):
        assert sorted(step) == sorted(whole)
    for rank in parts[-1]:
        error = (rank.parameters - theirs.parameters).norm() / theirs.parameters.norm()
        assert error <= 1e-12
    assert _num_changes(steps, theirs.seen) >= 0.9 * len(steps)


def _num_changes(steps, orders):
    """How often some place of a step was another rank's than in the step before."""
    owners = []
    for step, order in zip(steps, orders, strict=True):
        rank_of = {index: rank for rank, seen in enumerate(step) for index in seen}
        owners.append([rank_of[index] for index in order])
    full = [one for one in owners if len(one) == BATCH_SIZE]
    return sum(one != other for one, other in pairwise(full))
