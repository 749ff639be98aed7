"""How a watch gets into processes, and how little it does there before they train."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import product
from pathlib import Path

import pytest

import evenstep
from evenstep.watch._start_watch import PROCESS, SETTINGS, SITE, WatchSettings, environment, run

from .._tiers import slow_but

SOURCE = Path(evenstep.__file__).parents[1]


def python(code, *, paths=(), flags=(), **env):
    """What a fresh interpreter prints under a watch, with more folders on its path."""
    before = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment(WatchSettings(), before) | env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_sitecustomize_of_the_users_runs_as_before(tmp_path):
    """It is run once, under its name, and the watch's own stays out of sight."""
    (tmp_path / "sitecustomize.py").write_text("print('hello from', __file__)\nVALUE = 3\n")
    code = f"import sitecustomize, sys; print(sitecustomize.VALUE, {str(SITE)!r} in sys.path)"

    out, err = python(code, paths=[tmp_path])

    assert out == f"hello from {tmp_path / 'sitecustomize.py'}\n3 False\n"
    assert err == ""


def test_a_broken_sitecustomize_of_the_users_is_told_as_before(tmp_path):
    """Python tells its error, and goes on."""
    (tmp_path / "sitecustomize.py").write_text("1 / 0\n")

    out, err = python("print('goes on')", paths=[tmp_path])

    assert out == "goes on\n"
    assert "ZeroDivisionError" in err


def test_a_process_that_does_not_train_loads_nothing_more():
    """Next to nothing, and neither evenstep nor what takes long to load."""
    code = "import sys; print(*sorted(sys.modules))"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout

    out, _ = python(code)

    more = set(out.split()) - set(bare.split())
    assert more <= {"sitecustomize", "__future__", "pwd"}


def test_processes_started_by_others_are_reached():
    """The environment goes on to children, whatever starts them, and to theirs."""
    code = f"""
    import os, subprocess, sys
    print(os.environ["PYTHONPATH"].split(os.pathsep)[0], flush=True)
    if len(sys.argv) == 1:
        subprocess.run([sys.executable, "-c", "import os; print(os.environ['{SETTINGS}'])"])
    """

    out, _ = python(code)

    folder, settings = out.splitlines()
    assert folder == str(SITE)
    assert WatchSettings(**json.loads(settings)) == WatchSettings()


def test_an_isolated_interpreter_is_left_alone():
    """`python -I` reads no such path: it is not watched, and runs."""
    assert python("print(1)", flags=["-I"]) == ("1\n", "")


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_the_command_is_that_of_the_watch(status, capfd):
    """And of a command that opens no group here it is said, whatever it does on other machines."""
    command = [sys.executable, "-c", f"raise SystemExit({status})"]

    assert run(command, every_s=0, run_dir="") == status
    assert ("opened a process group: nothing was watched here" in capfd.readouterr().err) == (
        status == 0
    )


def test_the_console_script_is_the_same():
    """Options before `--` are the watch's, all after it are the command's."""
    command = [sys.executable, "-c", "import sys; sys.exit(len(sys.argv))", "--every", "x"]
    watch = [sys.executable, "-m", "evenstep.cli", "watch", "--every", "0", "--", *command]
    env = os.environ | {"PYTHONPATH": str(SOURCE)}

    assert subprocess.run(watch, env=env, capture_output=True).returncode == 3


WATCHES = {
    "console script": ["evenstep.cli", "watch"],
    "module": ["evenstep.watch"],
}
MISTAKES = {
    "a command that is not there": (["--", "no-such-command"], "no-such-command"),
    "a folder": (["--", "/"], "Permission denied"),
    "a negative time": (["--every", "-1", "--", sys.executable, "-c", ""], "--every"),
    "no number": (["--every", "nan", "--", sys.executable, "-c", ""], "--every"),
}


@pytest.mark.parametrize(
    ("mistake", "watch"),
    slow_but(
        [("a negative time", "console script"), *product(MISTAKES, ["module"])],
        product(MISTAKES, WATCHES),
    ),
)
def test_a_mistake_on_the_command_line_is_named(watch, mistake):
    """What is wrong and what to write instead; never a traceback, nor a watch that is off."""
    words, named = MISTAKES[mistake]
    command = [sys.executable, "-m", *WATCHES[watch], *words]
    env = os.environ | {"PYTHONPATH": str(SOURCE)}

    done = subprocess.run(command, env=env, capture_output=True, text=True)

    assert done.returncode == 2, done.stderr
    assert named in " ".join(done.stderr.split())  # wherever lines are broken
    assert "Traceback" not in done.stderr


def test_a_command_that_was_killed_has_the_status_of_a_shell(capfd):
    """128 and the signal's number."""
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]

    assert run(command, every_s=0, run_dir="") == 137


def test_the_last_summary_of_a_rank_that_was_killed_is_said(capfd):
    """Rank 0 leaves it now and then; the launcher says it where rank 0 could not."""
    code = f"""
    import json, os, pathlib
    folder = pathlib.Path(json.loads(os.environ["{SETTINGS}"])["launcher_dir"])
    (folder / "seen").touch()
    (folder / "summary.txt").write_text("so far\\n")
    """

    run([sys.executable, "-c", textwrap.dedent(code)], every_s=0, run_dir="")

    assert capfd.readouterr().err == "so far\n"


def test_a_process_of_a_cluster_stays_the_same_process(tmp_path):
    """`python -m evenstep.watch script.py` becomes the script: its number, its arguments."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        f"print(json.dumps([os.getpid(), sys.argv, os.environ['{PROCESS}'], __name__]))\n"
    )
    command = [sys.executable, "-m", "evenstep.watch", "--every", "3", script, "-x", "--", "a"]
    env = os.environ | {"PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)

    out, _ = process.communicate()

    number, arguments, told, name = json.loads(out)
    assert number == process.pid == int(told)
    assert arguments == [str(script), "-x", "--", "a"]
    assert name == "__main__"


def test_a_ctrl_c_is_left_to_the_terminal():
    """Wherever the input comes from: a second one would cut short what the command does last."""
    pty = pytest.importorskip("pty", reason="there are no terminals")
    code = """
    import os, signal, time
    signal.signal(signal.SIGINT, lambda number, frame: print("passed on", flush=True))
    os.setpgid(0, 0)  # away from the terminal's: what is heard now is what was passed on
    print("ready", flush=True)
    time.sleep(60)
    """
    command = ["-m", "evenstep.watch", "--", sys.executable, "-c", textwrap.dedent(code)]
    process, terminal = pty.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ["PYTHONPATH"] = str(SOURCE)
        os.execv(sys.executable, [sys.executable, *command])
    said = b""
    while b"^C" not in said:
        said += os.read(terminal, 4096)
        if said.strip() == b"ready":
            os.write(terminal, b"\x03")
    time.sleep(0.5)
    os.kill(process, signal.SIGTERM)  # which is passed on
    with contextlib.suppress(OSError):  # as Linux has the end of a terminal
        while more := os.read(terminal, 4096):
            said += more
    os.close(terminal)
    os.waitpid(process, 0)

    assert b"passed on" not in said


def test_a_watched_process_loads_nothing_that_balances():
    """No balancer, no planner, no policy and no channel: a watch needs none of them."""
    code = (
        "import sys; import evenstep.watch._attach; "
        "print(*sorted({name.split('.')[1] for name in sys.modules if name[:9] == 'evenstep.'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    rooms = {
        "torch",
        "network",
        "policies",
        "claims",
        "prediction",
        "_exchange",
        "_planner",
        "_run",
    }
    assert rooms.isdisjoint(done.stdout.split()), done.stdout
