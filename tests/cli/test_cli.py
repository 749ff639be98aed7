"""The command line changes on purpose, and says what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import evenstep
from evenstep.cli import main

from . import app

OPTIONS = {
    "": ["--help", "--version"],
    "demo": ["--help", "--out", "--policy", "--speeds", "--steps"],
    "doctor": [
        "--global-batch-size",
        "--help",
        "--json",
        "--nproc-per-node",
        "--out",
        "--step",
    ],
    "lab": ["--clean", "--cpus", "--delay-ms", "--help", "--mbit"],
    "simulate": [
        "--global-batch-size",
        "--help",
        "--intercepts",
        "--json",
        "--noise",
        "--policy",
        "--scenario",
        "--seeds",
        "--speeds",
        "--steps",
        "--trace",
        "--world-size",
    ],
    "report": ["--compare", "--help", "--output"],
    "top": ["--help", "--once", "--refresh"],
    "plan": [
        "--add",
        "--chunks",
        "--doctor",
        "--dtype",
        "--global-batch-size",
        "--help",
        "--hidden-size",
        "--intercepts",
        "--json",
        "--layers",
        "--lengths",
        "--max",
        "--mbit",
        "--memory",
        "--model-mb",
        "--optimizer",
        "--overhead",
        "--overlap",
        "--padded",
        "--parameters",
        "--run",
        "--sample-mb",
        "--speeds",
    ],
    "watch": ["--every", "--help", "--run-dir"],
}


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def options_of(command):
    return sorted(
        name
        for parameter in command.get_params(command.context_class(command))
        for name in parameter.opts
        if name.startswith("--")
    )


def test_options_change_on_purpose():
    """Adding one is a decision, written down here."""
    group = get_command(app)
    found = {name: options_of(command) for name, command in group.commands.items()}
    found[""] = options_of(group)

    assert found == OPTIONS


@pytest.mark.parametrize("command", OPTIONS)
def test_help_is_given_in_short_too(command):
    """``-h`` says what ``--help`` says, of the program and of each command."""
    short, long = (run(*filter(None, [command]), option) for option in ("-h", "--help"))

    assert (short.exit_code, short.output) == (0, long.output)


@pytest.mark.parametrize("command", OPTIONS)
def test_help_breaks_no_word(command):
    """In a terminal of 60 columns, where no line is longer either."""
    asked = [*filter(None, [command]), "--help"]
    narrow, wide = (
        CliRunner().invoke(app, asked, terminal_width=width).output for width in (60, 200)
    )

    assert max(map(len, narrow.splitlines())) <= 60
    assert re.sub(r"-\n\s+", "-", narrow).split() == wide.split()


def test_version_is_the_package_s():
    """One number, in one place."""
    result = run("--version")

    assert (result.exit_code, result.output.strip()) == (0, f"evenstep {evenstep.__version__}")


def test_help_names_the_commands():
    """Whoever types ``evenstep`` alone or with --help learns what there is."""
    for name in filter(None, OPTIONS):
        assert name in run("--help").output
        assert name in run().output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--speeds", "1"], "must name 2 to 256 workers, got 1."),
        (["--speeds", ",".join(["1"] * 257)], "must name 2 to 256 workers, got 257."),
        (["--steps", "3"], "--steps` must be at least 10, got 3."),
        (["--speeds", "quick"], "fractions such as 1/3 are accepted"),
        (["--policy", "nonsense"], "nonsense"),
    ],
)
def test_a_wrong_option_ends_with_the_remedy(tmp_path, arguments, words):
    """Code 2 as for any wrong usage, before a process is started or a folder made."""
    out = tmp_path / "out"
    result = run("demo", *arguments, "--out", str(out))

    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert not out.exists()


def test_a_demo_that_cannot_write_is_an_error_with_a_name(tmp_path):
    """Never a traceback."""
    (tmp_path / "file").write_text("in the way")
    result = run("demo", "--out", str(tmp_path / "file"))

    assert result.exit_code == 1
    assert "`evenstep demo --out` must be a folder to write in" in " ".join(result.stderr.split())
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("name", ["equal", "balanced"])
def test_a_demo_replaces_nothing_of_the_users(tmp_path, name):
    """Its own folders of before, and nothing else."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "data.csv").write_text("1,2\n")
    result = run("demo", "--out", str(tmp_path))

    assert result.exit_code == 2
    assert f"must hold no `{name}` of another making" in " ".join(result.stderr.split())


def test_a_policy_is_found_in_the_current_folder(tmp_path):
    """An installed script does not look there by itself, unlike ``python -m``."""
    (tmp_path / "mine.py").write_text("from evenstep.policies import Lbb as Mine\n")
    script = [sys.executable, "-P", "-c", "from evenstep.cli import main; main()"]
    asked = ["demo", "--policy", "mine:Mine", "--steps", "3"]
    result = subprocess.run(
        [*script, *asked], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )

    assert result.returncode == 2
    assert "--steps" in result.stderr  # refused after the policy, which was found
    assert "mine" not in result.stderr


@pytest.mark.parametrize(
    "asked",
    [
        ["plan", "--speeds", "2,1", "--global-batch-size", "9"],
        ["simulate", "--scenario", "static", "--steps", "3", "--seeds", "1", "--policy", "auto"],
    ],
)
def test_numpy_is_enough(tmp_path, asked):
    """Neither torch nor matplotlib is loaded, where they are installed or not."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'matplotlib', 'scipy']))"
    script = f"{blocked}; from evenstep.cli import main; main()"
    command = [sys.executable, "-c", script, *asked]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert (result.returncode, result.stderr) == (0, "")
    assert "workers" in result.stdout


def test_a_missing_extra_is_named(monkeypatch):
    """A bare installation has the command and says what it needs."""
    monkeypatch.setitem(sys.modules, "evenstep.cli._app", None)
    with pytest.raises(SystemExit) as caught:
        main()

    assert re.search(r"pip install .*\[cli\]", str(caught.value.code))


def test_the_command_is_installed():
    """``python -m evenstep.cli`` and ``evenstep`` are the same program."""
    command = [sys.executable, "-m", "evenstep.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)

    assert result.stdout.strip() == f"evenstep {evenstep.__version__}"
