"""Cells of a benchmark: each in its own process, and kept as soon as it ends."""

import json
import platform
import sys
from pathlib import Path

import pytest

from benchmarks._cells import ROOT, Command, anonymous, run_cells

HEADER = {"schema": "some", "machine": {"device": "cpu"}, "began": "now", "command": ["it"]}


def command(code, limit_s=60.0):
    """A cell that runs some Python."""
    return Command([sys.executable, "-c", code], limit_s)


def counting(count, said='{"value": 3}', status=0):
    """A cell that leaves a line in ``count`` each time that it runs."""
    return command(f"open({str(count)!r}, 'a').write('x'); print({said!r}); exit({status})")


def test_each_cell_is_kept_with_its_result_or_its_error(tmp_path):
    """One that fails, prints no JSON or is not for this machine does not keep the next from it."""
    path = tmp_path / "new" / "cells.json"
    cells = {
        "good": command("print('{\"value\": 3}')"),
        "raises": command("raise OSError('no such card')"),
        "dies": command("import os; os.abort()"),
        "silent": command("pass"),
        "elsewhere": command('print(\'{"not_run": "one card"}\')'),
        "last": command("print('{}')"),
    }
    yielded = dict(run_cells(cells, path, HEADER))
    kept = json.loads(path.read_text())

    assert kept == {**HEADER, "cells": yielded}
    status = {name: cell["status"] for name, cell in yielded.items()}
    assert status == {
        "good": "done",
        "raises": "failed",
        "dies": "failed",
        "silent": "failed",
        "elsewhere": "not run",
        "last": "done",
    }
    assert all({"seconds", "ended"} < cell.keys() for cell in yielded.values())
    assert yielded["good"]["result"] == {"value": 3}
    assert "no such card" in yielded["raises"]["error"]
    assert "no JSON" in yielded["silent"]["error"]
    assert yielded["elsewhere"]["reason"] == "one card"


def test_the_file_holds_each_cell_before_the_next_begins(tmp_path):
    """A run that is broken off loses the cell under way, and no other."""
    path = tmp_path / "cells.json"
    cells = {"one": command("print('{}')"), "two": command("print('{}')")}
    running = run_cells(cells, path, HEADER)
    next(running)

    assert list(json.loads(path.read_text())["cells"]) == ["one"]


def test_a_run_goes_on_where_it_was(tmp_path):
    """What is done is kept; what failed is tried again, as on a card that was busy then."""
    path, count = tmp_path / "cells.json", tmp_path / "count"
    again = {**HEADER, "began": "later", "command": ["another"]}
    first = {"done": counting(count), "failed": counting(count, status=1)}
    second = {"done": counting(count), "failed": counting(count), "new": counting(count)}
    list(run_cells(first, path, HEADER))
    found = dict(run_cells(second, path, again))

    assert count.read_text() == "x" * 4
    assert [cell["status"] for cell in found.values()] == ["done"] * 3
    assert list(json.loads(path.read_text())["cells"]) == ["done", "failed", "new"]


def test_a_file_of_another_machine_is_left_alone(tmp_path):
    """Cells of two machines in one file would be taken for those of one."""
    path = tmp_path / "cells.json"
    list(run_cells({"one": command("print('{}')")}, path, HEADER))
    before = path.read_text()
    other = {**HEADER, "machine": {"device": "cuda"}}
    with pytest.raises(SystemExit, match="of another machine"):
        list(run_cells({"two": command("print('{}')")}, path, other))

    assert path.read_text() == before


def test_a_cell_past_its_limit_is_ended_with_all_that_it_started(tmp_path):
    """Its processes too, or they would disturb the cells after it."""
    inner = "import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    cells = {"long": command(code, limit_s=2.0), "next": command("print('{}')")}
    found = dict(run_cells(cells, tmp_path / "cells.json", HEADER))

    assert found["long"]["status"] == "failed"
    assert found["long"]["error"].startswith("ended after 2 s")
    assert found["next"]["status"] == "done"


def test_errors_name_no_host_and_no_user():
    """The file is for others to read."""
    text = anonymous(f"Rank 0 on {platform.node()} at {Path.home()}/evenstep/x.py was lost")

    assert text == "Rank 0 on HOST at ~/evenstep/x.py was lost"
    assert anonymous(f'File "{ROOT}/benchmarks/x.py", line 3') == 'File "benchmarks/x.py", line 3'
