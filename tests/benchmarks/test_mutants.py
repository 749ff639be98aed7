"""The list of code that is broken on purpose keeps up with the code."""

import pytest

from benchmarks.mutants import MUTANTS, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_its_place_and_its_test_are_still_there(mutant):
    """To run them all takes minutes: a list that is out of date would be found late."""
    file, name = mutant.test.split("[")[0].split("::")

    assert (ROOT / "src" / "evenstep" / mutant.file).read_text("utf-8").count(mutant.old) == 1
    assert f"def {name}(" in (ROOT / file).read_text("utf-8")
