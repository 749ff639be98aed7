"""``evenstep report`` writes a page, or says what is wrong with a run."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.report.recorded import trained, written

from . import app


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


@pytest.fixture
def run(tmp_path):
    return written(tmp_path / "mine", trained(5, 2))


def test_a_page_is_written_beside_the_run(run):
    """Given the folder or the file, under a name that it prints."""
    assert report(run).exit_code == 0
    (run / "report.html").unlink()
    result = report(run / "events.jsonl")

    assert result.exit_code == 0, result.output
    assert str(run / "report.html") in result.output
    assert "<title>Report: mine</title>" in (run / "report.html").read_text("utf-8")


def test_two_runs_make_one_page(run, tmp_path):
    """Where it is to be written is an option."""
    other = written(tmp_path / "other", trained(5, 2, seed=1))
    result = report(run, "--compare", other, "--output", tmp_path / "both.html")

    assert result.exit_code == 0, result.output
    assert "Report: mine and other" in (tmp_path / "both.html").read_text("utf-8")


def test_what_was_left_out_is_said(run):
    """On standard error, and the page is made all the same."""
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    result = report(run)

    assert result.exit_code == 0
    assert "1 damaged line" in result.stderr


@pytest.mark.parametrize("name", ["nothing", "empty", "x" * 300])
def test_no_run_is_an_error_with_a_name(tmp_path, name):
    """Never a traceback."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "events.jsonl").write_bytes(b"")
    result = report(tmp_path / name)

    assert result.exit_code == 2
    assert "Runtime(run_dir=...)" in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_page_that_cannot_be_written_is_an_error_with_a_name(run, tmp_path):
    """The option is named."""
    result = report(run, "--output", tmp_path / "no" / "such" / "folder.html")

    assert result.exit_code == 2
    assert "--output" in result.stderr


def test_an_older_page_stays_where_a_new_one_cannot_be_written(run):
    """Whole: here a file may not be longer than a thousand bytes, as on a disk that is full."""
    resource = pytest.importorskip("resource", reason="no such limits on Windows")
    page = run / "report.html"
    page.write_text("an older page")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        result = report(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert result.exit_code == 2
    assert "--output" in result.stderr
    assert page.read_text() == "an older page"
    assert {file.name for file in run.iterdir()} == {"events.jsonl", "report.html"}


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_page_goes_where_a_link_or_a_pipe_leads(run, tmp_path, kind):
    """Which is not replaced by a file."""
    output = tmp_path / "output"
    if kind == "link":
        output.symlink_to(tmp_path / "page.html")
        assert report(run, "--output", output).exit_code == 0
        assert output.is_symlink()
        assert "<title>" in (tmp_path / "page.html").read_text("utf-8")
    else:
        os.mkfifo(output)
        with subprocess.Popen(["cat", output], stdout=subprocess.PIPE) as reader:
            assert report(run, "--output", output).exit_code == 0
            assert b"<title>" in reader.communicate()[0]
        assert output.is_fifo()


def test_a_page_goes_to_standard_output_too(run):
    """Which is a pipe that has no name in any folder."""
    command = [sys.executable, "-m", "evenstep.cli", "report", run, "--output", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, check=True)

    assert b"<title>" in done.stdout


@pytest.mark.parametrize("which", ["RUN", "RUN2"])
def test_a_page_never_takes_the_place_of_the_events(run, tmp_path, which):
    """By any name: they cannot be recorded again."""
    other = written(tmp_path / "other", trained(5, 2, seed=1))
    kept = {"RUN": run, "RUN2": other}[which] / "events.jsonl"
    link = tmp_path / "link.html"
    link.symlink_to(kept)
    before = kept.read_bytes()
    for output in (kept, link):
        result = report(run, "--compare", other, "--output", output)

        assert result.exit_code == 2
        assert "--output" in result.stderr
        assert kept.read_bytes() == before


def test_a_folder_may_be_named_by_any_bytes(run, tmp_path):
    """What is no character is shown as one that is missing."""
    odd = run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff"))
    result = report(odd, "--output", tmp_path / "page.html")

    assert result.exit_code == 0, result.output
    assert "<title>Report: odd?</title>" in (tmp_path / "page.html").read_text("utf-8")
