"""The ledger of the papers' statements: its code exists, and its commands run."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys

import pytest

from .._snippets import ROOT

PAGE = ROOT / "evidence" / "seeds.md"
PAPERS_FOUND = ROOT / "evidence" / "papers.json"
HEADER = ["statement", "how sure", "code", "shown by", "figure"]
PAPERS = ("LB-BSP, 2018", "LB-BSP, 2020", "Dynamic batching", "LBB", "Balanced parameter servers")
PYTEST = "python -m pytest "


def ledger():
    """The rows of all tables with the ledger's header, as dictionaries."""
    rows, inside = [], False
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        inside = line.startswith("|") and (inside or cells == HEADER)
        if inside and cells != HEADER and set(line) - set("|-"):
            rows.append(dict(zip(HEADER, cells, strict=True)))
    return rows


LEDGER = ledger()
NAMED = sorted({name for row in LEDGER for name in re.findall(r"`([^`]*)`", row["code"])})
COMMANDS = {command for row in LEDGER for command in re.findall(r"`([^`]*)`", row["shown by"])}
PROGRAMS = sorted(command for command in COMMANDS if not command.startswith(PYTEST))
TESTS = sorted({test for each in COMMANDS - {*PROGRAMS} for test in each.split()[3:]})


def exists(name):
    """Whether a path of this tree, or a public name with its package, is there."""
    if "/" in name:
        return (ROOT / name).exists()
    package, _, public = name.rpartition(".")
    return public in importlib.import_module(package).__all__


def run(*arguments):
    """Run Python in this tree."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    paths = (str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)


def test_each_paper_has_its_lines():
    """Five papers; a page that lost one, or a table of another form, is noticed."""
    titles = re.findall(r"^## (.*)$", PAGE.read_text("utf-8"), re.M)

    assert all(any(title.startswith(paper) for title in titles) for paper in PAPERS)
    assert len(LEDGER) >= 10 * len(PAPERS)


@pytest.mark.parametrize("row", LEDGER, ids=[row["statement"][:50] for row in LEDGER])
def test_a_line_says_how_sure_it_is_and_what_shows_it(row):
    """What has no command is said to be left out, or not to be there yet."""
    assert row["statement"]
    assert row["how sure"] in {"sure", "second-hand", "reconstructed"}
    assert row["code"] in {"not yet", "left out"} or (
        re.findall(r"`[^`]+`", row["code"]) and re.fullmatch(r"`[^`]+`", row["shown by"])
    )


@pytest.mark.parametrize("name", NAMED)
def test_the_code_exists(name):
    """Renamed or removed, it would be looked for in vain."""
    assert exists(name)


@pytest.mark.slow
@pytest.mark.parametrize("command", PROGRAMS)
def test_what_a_command_shows_still_holds(command):
    """Each program once, in short; it ends with an error where one of its bars is missed."""
    done = run(*command.split()[1:], "--quick")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("test", TESTS)
def test_the_tests_that_are_named_are_there(test):
    """They run where they stand, like all others; here they are only found."""
    path, *inside = test.partition("[")[0].split("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    for name in inside:
        tree = next(node for node in tree.body if getattr(node, "name", None) == name)


def values_in(found):
    """All numbers and words that a benchmark printed."""
    if isinstance(found, dict):
        return [*found, *(value for one in found.values() for value in values_in(one))]
    if isinstance(found, list):
        return [value for one in found for value in values_in(one)]
    return [] if isinstance(found, bool | None) else [found]


def unlike(row, values):
    """The figures of a line that a benchmark did not print.

    A line may round, and say a share in percent, or how much less time a factor means. Numbers
    that stand in the statement, or in the benchmark's words, are no figures.
    """
    numbers = [value for value in values if isinstance(value, int | float)]
    words = " ".join([row["statement"], *(value for value in values if isinstance(value, str))])
    said = re.findall(r"\d+(?:\.\d+)?", re.sub(r"\$[^$]*\$", "", row["figure"]))
    known = {*re.findall(r"\d+(?:\.\d+)?", words)}
    for places in range(4):
        known |= {f"{value:.{places}f}" for value in numbers}
        known |= {f"{100 * value:.{places}f}" for value in numbers if value < 1}
        known |= {f"{100 - 100 / value:.{places}f}" for value in numbers if value > 1}
    return [figure for figure in said if figure not in known]


def test_figures_of_papers_are_those_that_were_printed():
    """As the committed file has them: `make evidence ARGS="--only papers"`."""
    values = values_in(json.loads(PAPERS_FOUND.read_text("utf-8"))["rows"])
    rows = [row for row in LEDGER if row["shown by"] == "`python -m benchmarks.papers`"]

    assert len(rows) >= 20
    assert [figure for row in rows for figure in unlike(row, values)] == []
    assert unlike({"statement": "twice as fast", "figure": "1.418, bound 1.44"}, [1.4173]) == [
        "1.418",
        "1.44",
    ]
