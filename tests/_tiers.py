"""Cases that `make test` runs, beside those that are left to `make test TESTS=all`."""

from __future__ import annotations

import pytest

COLLECTED = pytest.StashKey[tuple[set[str], set[str]]]()
"""The tests of a run, without their parameters: those with a case of `make test`, and all."""


def slow_but(first, cases):
    """Return ``cases`` as parameters; all but those in ``first`` are slow."""
    return [
        case
        if case in first
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


class Groups:
    """What came of cases that share a run: one run of ``first``, another one of all others.

    Each is made when one of its cases is asked for, so that `make test` pays for its own alone.

    Args:
        first: cases of `make test`.
        cases: all of them.
        run: returns what came of some cases, by case.
    """

    def __init__(self, first, cases, run):
        self._groups = tuple(first), tuple(case for case in cases if case not in first)
        self._run, self._found = run, {}

    def __getitem__(self, case):
        group = self._groups[case not in self._groups[0]]
        if group not in self._found:
            self._found[group] = self._run(group)
        return self._found[group][case]
