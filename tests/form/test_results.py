"""Every measured figure of evidence/results.md is that of the files it was made from."""

import json
import re
import shutil

from benchmarks._results import BLOCK, EVIDENCE, PAGE, TABLES, page


def test_the_page_says_what_the_files_say():
    """`make results` would change nothing; and each table on it has figures."""
    text = PAGE.read_text("utf-8")
    tables = {table for _, _, table, _, _ in BLOCK.findall(text)}

    assert page(text, EVIDENCE) == text
    assert tables == TABLES.keys()


def test_another_figure_in_a_file_is_another_page(tmp_path):
    """One second more until its last update changes the line of that contestant."""
    shutil.copytree(EVIDENCE.parent, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "arena" / "lbb-static.exact.json"
    found = json.loads(path.read_text("utf-8"))
    found["entries"][0]["updates_s"][-1] += 1
    path.write_text(json.dumps(found), "utf-8")
    text = PAGE.read_text("utf-8")

    assert page(text, tmp_path / "arena") != text


def test_outside_of_its_tables_the_page_has_no_seconds_of_ours():
    """What is measured stands in a table that is made, so that prose cannot go stale."""
    prose = BLOCK.sub("", PAGE.read_text("utf-8"))

    assert not re.findall(r"±", prose)
