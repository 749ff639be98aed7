"""``evenstep lab`` reads what is asked for, refuses what cannot be, and runs the rest."""

import re
import signal
import sys

import pytest
from typer.testing import CliRunner

from evenstep.cli._run_commands import _hosts, _in_words
from evenstep.lab import Host, Lab, LabUnavailable

from . import app


def lab(*arguments):
    return CliRunner().invoke(app, ["lab", *map(str, arguments)])


@pytest.mark.parametrize(
    ("cpus", "mbit", "hosts"),
    [
        ("0.8,1/2", "200,100:50", [Host(cpus=0.8, mbit=200), Host(cpus=0.5, mbit=(100, 50))]),
        ("0.5", "200,50", [Host(cpus=0.5, mbit=200), Host(cpus=0.5, mbit=50)]),
        ("0.5,0.4", None, [Host(cpus=0.5), Host(cpus=0.4)]),
        (None, "20", [Host(mbit=20)]),
    ],
)
def test_lists_give_the_hosts(cpus, mbit, hosts):
    """As many as the longer one has; one number stands for all."""
    assert _hosts(cpus, mbit) == hosts


def test_the_hosts_are_said_in_words():
    """What was not limited too."""
    said = _in_words([Host(cpus=0.5, mbit=20), Host(mbit=(10, 5)), Host()])

    assert said == ("3 hosts, 0.5 CPU 20 Mbit/s, any CPU 10:5 Mbit/s, any CPU any Mbit/s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "-- script.py"),
        (["--mbit", "20,20"], "-- script.py"),
        (["script.py"], "--cpus, --mbit"),
        (["--mbit", "fast", "script.py"], "--mbit"),
        (["--mbit", "1:2:3", "script.py"], "--mbit"),
        (["--mbit", "20,0", "script.py"], "from 0.1 to 10000"),
        (["--cpus", "0.01", "script.py"], "at least 0.1"),
        (["--cpus", "a", "script.py"], "--cpus"),
        (["--cpus", "1,1", "--mbit", "1,1,1", "script.py"], "each of the 3 hosts"),
        (["--mbit", "20", "--delay-ms", "-1", "script.py"], "delay_ms"),
        (["--mbit", "20", "--trace", "changes.csv", "script.py"], "No such option: --trace"),
        (
            ["--mbit", "20,20", "no/such.py", "--", "--its"],
            "SCRIPT` must be a file, got no/such.py",
        ),
        (["--clean", "--mbit", "20"], "stand alone"),
    ],
)
def test_a_wrong_option_ends_with_the_remedy(arguments, words):
    """Code 2, on stderr, before anything is made: by anybody, on any system."""
    result = lab(*arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    assert words in re.sub(r"\s+", " ", result.stderr)


@pytest.mark.parametrize("asked", [["--mbit", "20", "script.py"], ["--clean"]])
def test_where_no_lab_can_be_made_it_says_why(tmp_path, monkeypatch, asked):
    """Code 1, for running and for cleaning; the system, the user or the package."""
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    result = lab(*asked)

    assert (result.exit_code, result.stdout) == (1, "")
    assert re.search(r"on Linux|sudo|pip install .*\[lab\]", result.stderr)


@pytest.mark.cluster
def test_the_code_is_the_script_s(tmp_path, monkeypatch):
    """Each line with its host; what an agent ends with is what the command ends with.

    In torchrun's place stands what says how it was called: the script's options are its own.
    """
    try:
        with Lab([Host()]):
            pass
    except LabUnavailable as error:
        pytest.skip(f"no lab can be made here: {error}")
    stand_in = tmp_path / "torch" / "distributed" / "run.py"
    stand_in.parent.mkdir(parents=True)
    for folder in (stand_in.parent, stand_in.parent.parent):
        (folder / "__init__.py").touch()
    stand_in.write_text("import sys; print(*sys.argv[-3:]); sys.exit(7)\n")
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    handlers = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    result = lab("--mbit", "50,20", "--", "script.py", "--mbit", "7")

    assert result.exit_code == 7
    assert handlers == [
        signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ]
    assert sorted(result.stdout.splitlines()) == [f"[h{i}] script.py --mbit 7" for i in range(2)]
    assert re.match(
        r"lab [0-9a-f]{8}: 2 hosts, any CPU 50 Mbit/s, any CPU 20 Mbit/s\n", result.stderr
    )
