"""`make evidence` keeps what was found, and goes on where it was."""

import json
import subprocess
import sys

import pytest

from benchmarks._evidence import collect, source_of

FOUND = '{"machine": {}, "rows": []}'


def command(count, said=FOUND, status=0):
    """A command that says something, and leaves a line in ``count`` each time that it runs."""
    code = f"open({str(count)!r}, 'a').write('x\\n'); print({said!r}); raise SystemExit({status})"
    return [sys.executable, "-c", code]


def test_what_is_there_is_not_made_again(tmp_path):
    """A result of the same source is kept; one of another source is made anew."""
    count, folder = tmp_path / "count", tmp_path / "evidence"
    short = [collect({"one": command(count)}, folder, source) for source in ("a", "a", "b")]
    kept = json.loads((folder / "one.json").read_text())

    assert short == [[], [], []]
    assert count.read_text() == "x\n" * 2
    assert (kept["source"], kept["status"], kept["rows"]) == ("b", 0, [])


def test_a_missed_bar_is_kept_and_said(tmp_path):
    """It is a result too; said again at the next run, without being measured again."""
    count = tmp_path / "count"
    commands = {"missed": command(count, status=1), "met": command(count)}
    short = [collect(commands, tmp_path / "evidence", "a") for _ in range(2)]

    assert short == [["missed"]] * 2
    assert count.read_text() == "x\n" * 2


def test_what_broke_down_leaves_no_result(tmp_path):
    """Nor an old one of another source; the next run tries again."""
    count, folder = tmp_path / "count", tmp_path / "evidence"
    collect({"one": command(count)}, folder, "a")
    broken = {"one": command(count, said="Traceback", status=1)}
    short = [collect(broken, folder, "b") for _ in range(2)]

    assert short == [["one"]] * 2
    assert list(folder.iterdir()) == []
    assert count.read_text() == "x\n" * 3


def test_evidence_is_of_a_commit(tmp_path):
    """The trees of source and benchmarks name it; what is not committed is refused."""
    for folder in ("src", "benchmarks"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text(folder)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    first = source_of(tmp_path)
    (tmp_path / "notes").write_text("of neither")

    assert len(first.split()) == 2
    assert source_of(tmp_path) == first
    (tmp_path / "src" / "code.py").write_text("changed")
    with pytest.raises(SystemExit, match="Commit these first"):
        source_of(tmp_path)
