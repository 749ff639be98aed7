"""``evenstep doctor`` starts its ranks, says what it finds, and feeds ``evenstep plan``."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evenstep._doctor import Device, read_checkup, to_json
from tests.doctor.facts import changed, checkup, links, pace, rank

from . import app


@pytest.fixture(autouse=True)
def as_started_by_hand(monkeypatch, tmp_path):
    """No variable of torchrun's, in a folder of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def two_hosts(folder):
    """A checkup of a fast and a slow rank, with links of 200 and 100 Mbit/s, in a file."""
    ranks = [changed(rank(0), "cpu"), rank(1, "b")]
    found = checkup(*ranks, links=links(2, mbit=100.0), paces=(pace(0, 300), pace(1, 100)))
    (folder / "doctor.json").write_text(to_json(found, ()))
    return folder / "doctor.json"


@pytest.mark.slow
@pytest.mark.cluster
def test_two_ranks_are_started_and_looked_at(tmp_path):
    """On this machine, by one command, with a step of one's own; the file is what was found."""
    (tmp_path / "train.py").write_text("import time\ndef step(n):\n    time.sleep(n * 0.001)\n")
    command = [sys.executable, "-m", "evenstep.cli", "doctor", "--nproc-per-node", "2"]
    options = ["--step", "train.py:step", "--global-batch-size", "16", "--out", "found.json"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = read_checkup(tmp_path / "found.json")

    assert "2 ranks on 1 host" in done.stdout
    assert "evenstep plan --doctor found.json" in done.stdout
    assert (found.world_size, found.missing, found.workload) == (2, (), "train.py:step")
    assert {size for pace in found.paces for size in pace.sizes} == {2, 8}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc-per-node", "0"], "must be from 1 to 1,024, got 0"),
        (["--step", "train"], "MODULE:FUNCTION or FILE:FUNCTION, got train"),
        (["--global-batch-size", "1", "--nproc-per-node", "2"], "must be at least 2, got 1"),
        (["--global-batch-size", "0"], "must be at least 1, got 0"),
        (["--out", "gone/doctor.json"], "gone/doctor.json"),
        (["--out", "."], "`evenstep doctor --out` must be a file to write, got ."),
        (["--out", ".", "--nproc-per-node", "2"], "`evenstep doctor --out` must be a file to"),
        (["--nproc-per-node", "1000000000"], "must be from 1 to 1,024, got 1000000000"),
    ],
)
def test_a_wrong_option_ends_with_the_remedy(options, words):
    """Code 2, before anything is measured."""
    result = run("doctor", *options)

    assert result.exit_code == 2
    assert words in re.sub(r"\s+", " ", result.output)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, on Linux")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_was_found_is_printed_where_it_cannot_be_kept(tmp_path, options):
    """A disk may fill up while ranks are looked at; the code says that there is no file."""
    (tmp_path / "train.py").write_text("import time\ndef step(n):\n    time.sleep(n * 0.001)\n")
    asked = ["--nproc-per-node", "1", "--step", "train.py:step", "--out", "/dev/full"]
    result = run("doctor", *asked, *options)

    assert result.exit_code == 1
    assert ('"evenstep.doctor"' if options else "1 rank on 1 host") in result.stdout
    assert "`evenstep doctor --out` must be a file to write, got /dev/full" in result.stderr
    assert "Written to" not in result.stdout


def test_a_look_at_where_to_write_leaves_nothing(tmp_path, monkeypatch):
    """Neither an empty file nor an older one that is shorter, where no run comes about."""
    (tmp_path / "older.json").write_text("older")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("older.json", "new.json"):
        asked = ["--global-batch-size", "1", "--out", name]
        monkeypatch.setattr(sys, "argv", ["evenstep.doctor", *asked])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("evenstep.doctor", run_name="__main__")
        assert ended.value.code == 2

    assert (tmp_path / "older.json").read_text() == "older"
    assert not (tmp_path / "new.json").exists()


def test_plan_reads_the_file(tmp_path):
    """Speeds, names and samples per step."""
    result = run("plan", "--doctor", two_hosts(tmp_path), "--json")
    found = json.loads(result.stdout)

    assert [each["samples_per_s"] for each in found["workers"]] == pytest.approx([300, 100])
    assert [each["name"] for each in found["workers"]] == ["0 a some CPU", "1 b some CPU"]
    assert found["balanced"]["batch_size"] == [48, 16]


def test_plan_takes_the_links_as_well(tmp_path):
    """Where the size of gradients is given; what is typed goes first."""
    file = two_hosts(tmp_path)
    measured = json.loads(run("plan", "--doctor", file, "--model-mb", "8", "--json").stdout)
    typed = json.loads(
        run("plan", "--doctor", file, "--model-mb", "8", "--mbit", "7", "--json").stdout
    )

    assert measured["links"]["mbit"] == pytest.approx([100, 100])
    assert typed["links"]["mbit"] == [7, 7]


def test_plan_calls_workers_by_their_ranks(tmp_path):
    """Where one had no times: the others keep their numbers, and it is named."""
    ranks = [rank(number, "abcd"[number]) for number in range(4)]
    paces = (pace(0), pace(2), pace(3, speed=1))
    found = checkup(*ranks, links=links(4, mbit=100.0), paces=paces)
    (tmp_path / "doctor.json").write_text(to_json(found, ()))
    asked = "plan", "--doctor", "doctor.json", "--model-mb", "8"
    told = json.loads(run(*asked, "--json").stdout)
    text = run(*asked).stdout

    assert [worker["rank"] for worker in told["workers"]] == [0, 2, 3]
    assert told["workers"][2]["worth_keeping"] is False
    assert re.search(r"^without 3 ", text, re.M)
    assert "Fastest without worker 3:" in text
    assert re.search(r"^3 d some CPU .* leave out$", text, re.M)
    assert re.search(r"^3 +100 ", text, re.M)  # its link
    assert "Rank 1 has no times and is left out" in text


def test_plan_asks_for_links_of_ranks_that_have_times_alone(tmp_path):
    """One that has none shares no link with the other of its host."""
    found = checkup(
        rank(0), rank(1), rank(2, "b"), links=links(3, mbit=100.0), paces=(pace(0), pace(2))
    )
    (tmp_path / "doctor.json").write_text(to_json(found, ()))
    told = json.loads(run("plan", "--doctor", "doctor.json", "--model-mb", "8", "--json").stdout)

    assert told["links"]["mbit"] == pytest.approx([100, 100])


def test_plan_prints_nothing_that_a_terminal_would_obey(tmp_path):
    """Names come from another's file."""
    odd = rank(1, "\x1b[2Jb", device=Device("cpu", "\x1b]0;title\x07"))
    found = checkup(rank(0), odd, paces=(pace(0), pace(1)))
    (tmp_path / "doctor.json").write_text(to_json(found, ()))
    told = [run("plan", "--doctor", "doctor.json").output]
    told.append(run("plan", "--doctor", "doctor.json", "--model-mb", "8").output)

    assert all("[2Jb" in text and text.replace("\n", "").isprintable() for text in told)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--doctor", "gone.json"], "must name a file that can be read, got gone.json"),
        (["--doctor", "."], "must name a file that can be read"),
        (["--doctor", "bad.json"], "must be JSON"),
        (["--doctor", "doctor.json", "--speeds", "1,2"], "got --speeds and --doctor"),
        (["--doctor", "doctor.json", "--intercepts", "1"], "be left out with --doctor"),
        (["--doctor", "unlinked.json", "--model-mb", "8"], "got none for a, b. Write `--mbit"),
        (["--doctor", "shared.json", "--model-mb", "8"], "got 2 workers on a, which share its"),
    ],
)
def test_plan_refuses_what_is_no_checkup(tmp_path, options, words):
    """With the remedy, and without a traceback."""
    file = two_hosts(tmp_path)
    record = json.loads(file.read_text())
    record["checkup"]["links"] = []
    (tmp_path / "unlinked.json").write_text(json.dumps(record))
    (tmp_path / "bad.json").write_text("nonsense")
    shared = checkup(rank(0), rank(1), rank(2, "b"), links=links(3), paces=[*map(pace, range(3))])
    (tmp_path / "shared.json").write_text(to_json(shared, ()))
    result = run("plan", *options)

    assert result.exit_code == 2
    assert words in re.sub(r"\s+", " ", result.output)
