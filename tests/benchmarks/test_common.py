"""What every benchmark shares: rows of plain values, whatever they were computed with."""

import json
import sys

import numpy as np
import pytest

from benchmarks._common import Row, main


@pytest.mark.parametrize(("met", "status"), [(True, 0), (False, 1), (None, 0)])
@pytest.mark.parametrize("kind", [bool, np.bool_])
def test_a_missed_bar_is_the_status(monkeypatch, capsys, met, status, kind):
    """A comparison of numpy's counts as one of Python's; numbers and arrays are told as JSON."""
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json"])
    measured = {"count": np.int64(3), "seconds": np.array([0.5, 1.0])}
    row = Row("what", "bar", measured, None if met is None else kind(met))
    with pytest.raises(SystemExit) as ended:
        main("", lambda options: [row])
    (told,) = json.loads(capsys.readouterr().out)["rows"]

    assert int(ended.value.code) == status
    assert told == {
        "what": "what",
        "bar": "bar",
        "measured": {"count": 3, "seconds": [0.5, 1.0]},
        "met": met,
    }


def test_each_row_is_told_as_it_is_measured(monkeypatch, capsys):
    """With ``--json`` too, on standard error: a benchmark that is broken off has told something."""
    monkeypatch.setattr(sys, "argv", ["benchmark", "--json"])

    def rows(options):
        yield Row("the first", "at most 2", {"count": 3}, met=False)
        assert capsys.readouterr() == ("", "MISSED  the first  [at most 2]\n        count 3\n")

    with pytest.raises(SystemExit):
        main("", rows)
