"""Code that is broken on purpose: the list keeps up with the code, and a seed draws more."""

import ast
from collections import Counter

import pytest

from benchmarks._drawn_mutants import LEAST, TESTS, draw, room_of
from benchmarks.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_its_place_and_its_test_are_still_there(mutant):
    """To run them all takes minutes: a list that is out of date would be found late."""
    file, name = mutant.test.split("[")[0].split("::")

    assert (ROOT / "src" / "evenstep" / mutant.file).read_text("utf-8").count(mutant.old) == 1
    assert f"def {name}(" in (ROOT / file).read_text("utf-8")


def test_every_room_has_mutants_and_a_seed_draws_the_same():
    """Whoever has the seed and the source can make each again."""
    drawn = draw(ROOT, 3, 100)

    assert draw(ROOT, 3, 100) == drawn != draw(ROOT, 4, 100)
    assert len({str(mutant) for mutant in drawn}) == len(drawn) == 100
    assert min(Counter(room_of(mutant.file) for mutant in drawn).values()) >= LEAST
    assert {room_of(mutant.file).partition("/")[0] for mutant in drawn} == TESTS.keys()


@pytest.mark.parametrize("mutant", draw(ROOT, 5, 60), ids=str)
def test_a_drawn_mutant_is_code_with_one_change(mutant):
    """Its lines alone differ, and Python reads another program."""
    text = (ROOT / mutant.file).read_text("utf-8")
    changed = mutant.apply(text)
    before = "".join(text.splitlines(keepends=True)[: mutant.line - 1])
    after = text[len(before) + len(mutant.old) :]

    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    assert changed == before + mutant.new + after
    assert text == before + mutant.old + after
