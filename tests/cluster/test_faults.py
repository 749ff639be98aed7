"""The fault matrix of `benchmarks.faults`: which cells there are, and how one is judged and run."""

import json
from argparse import Namespace
from dataclasses import replace
from itertools import combinations, product
from math import inf

import pytest

from benchmarks._fault_cells import KINDS, POINTS, RANKS, WRAPS, Cell, covering, drawn, pairwise
from benchmarks._fault_cluster import Ended, Outcome, limit_s, problems_of, run_cell
from benchmarks.faults import groups_of, run_all

CELL = Cell("barrier", "kill", 1, "ddp")
WELL = Ended(seconds=4.0, code=1, named=(1,), cleaned_s=2.0, said="Rank 1 on here was lost")
MET = Outcome(limit_s=9.0, struck=True, others={0: WELL, 2: WELL}, cleaned=False, remained=0)


def pairs(rows):
    """Every two values of two axes that meet in a row."""
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize("axes", [("ab", "xyz"), ("abcd", "xy", "12", "+-"), ("a", "x", "1")])
def test_every_two_values_meet(axes):
    """In far fewer rows than there are combinations."""
    rows = pairwise(*axes)

    assert pairs(rows) == pairs(product(*axes))
    assert len(rows) == len(set(rows))
    assert len(rows) <= len(list(product(*axes)))


def test_the_covering_set_is_small_and_holds_every_place_with_every_kind():
    """At most 120 runs, the same ones every time."""
    cells = covering()

    assert {(cell.point, cell.kind) for cell in cells} == set(product(POINTS, KINDS))
    assert {(cell.point, cell.victim) for cell in cells} == set(product(POINTS, RANKS))
    assert {(cell.kind, cell.victim, cell.wrap) for cell in cells} == set(
        product(KINDS, RANKS, WRAPS)
    )
    assert len(cells) <= 120
    assert cells == covering()


def test_drawn_cells_are_others_and_follow_from_the_seed():
    """So that a run that was broken off goes on with the same ones."""
    cells = drawn(20, seed=7)

    assert len(set(cells) - set(covering())) == 20
    assert cells == drawn(20, seed=7) != drawn(20, seed=8)


def test_an_outcome_as_it_should_be_has_no_problems():
    """Whoever has nothing left to do at the end of a run blames nobody."""
    done = Ended(seconds=1.0, code=0, cleaned_s=0.5)
    end = replace(CELL, point="end of run")

    assert problems_of(CELL, MET) == ()
    assert problems_of(end, replace(MET, others={0: done, 2: WELL})) == ()
    assert problems_of(replace(end, kind="hang"), replace(MET, others={0: done, 2: done})) == ()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"seconds": None}, "rank 2 did not end"),
        ({"seconds": 9.5}, "rank 2 ended late"),
        ({"named": ()}, "rank 2 blames nobody"),
        ({"named": (0, 1)}, "rank 2 blames 0, 1"),
        ({"named": (), "code": 0}, "rank 2 blames nobody"),
        ({"cleaned_s": None}, "rank 2: no `finally`"),
    ],
)
def test_a_problem_of_one_rank_is_told(changed, problem):
    """One that went on as if nothing had happened is one, too."""
    others = {0: WELL, 2: replace(WELL, **changed)}

    assert problem in problems_of(CELL, replace(MET, others=others))


def test_problems_of_the_cell_are_told():
    """A fault that never came, an own `finally` that did not run, processes that stay."""
    raised, hung = replace(CELL, kind="raise"), replace(CELL, kind="hang")

    assert problems_of(CELL, replace(MET, struck=False)) == ("the fault never came",)
    assert problems_of(CELL, replace(MET, remained=1)) == ("1 remained",)
    assert problems_of(raised, MET) == ("the victim: no `finally`",)
    assert problems_of(hung, MET) == ("the victim: no `finally`",)
    assert limit_s("hang") > limit_s("stop") == limit_s("kill")


def test_a_run_that_was_broken_off_goes_on(tmp_path):
    """Cells that lie in its folder are not run again."""
    found = {"cell": str(CELL), "problems": ["rank 2 ended late"]}
    (tmp_path / f"{CELL.file_name}.json").write_text(json.dumps(found))

    assert run_all([CELL], tmp_path, Namespace(at_once=1)) == {CELL: found}


def test_a_part_of_the_cells_can_be_asked_for():
    """A few of each kind, or those with some words in their name."""
    asked = {"seed": 0, "quick": True, "only": ""}
    quick = groups_of(Namespace(**asked))
    some = groups_of(Namespace(**asked | {"quick": False, "only": "at save"}))

    assert {cell.kind for group in quick.values() for cell in group} == set(KINDS)
    assert sum(map(len, quick.values())) <= 12
    assert {cell.point for group in some.values() for cell in group} == {"save"}
    assert {cell.kind for group in some.values() for cell in group} == set(KINDS)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize(
    "cell",
    [
        CELL,
        Cell("save", "stop", 0, "fsdp2"),
        Cell("data set", "raise", 2, "ddp"),
        Cell("mean", "hang", 0, "ddp"),
    ],
    ids=str,
)
def test_a_cell_is_met(cell, tmp_path):
    """With real processes, however slow the machine: `benchmarks.faults` runs all the others."""
    outcome = replace(run_cell(cell, tmp_path), limit_s=inf)

    assert problems_of(cell, outcome) == ()
