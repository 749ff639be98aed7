"""Start trainings with and without a watch, and read what they say."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from .._aborts import run
from .._ranks import printed

SCRIPT = Path(__file__).with_name("trainings.py")
ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def environment(env):
    """This tree on the path of Python; environment variables of a cluster are left out."""
    kept = {name: value for name, value in os.environ.items() if "EVENSTEP" not in name}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | env


def start(arguments, **env):
    """Run Python to its end, in a folder of its own, which may get files."""
    command = [sys.executable, *map(str, arguments)]
    with TemporaryDirectory() as folder:
        return run(command, env=environment(env), timeout=150, cwd=folder)


def begun(command, **env):
    """Begin to run Python's arguments ``command`` under a watch, as from a terminal of its own.

    Without one, the watch would pass on a Ctrl-C that the command has got already.
    """
    options = ["--every", "2", "--", sys.executable]
    keyboard, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "evenstep.watch", *options, *map(str, command)],
        stdin=terminal,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(env),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored, perhaps
    )
    os.close(terminal)
    return process, keyboard


def plain(kind, *arguments, **env):
    """The losses of each of two ranks without a watch, bit by bit."""
    return _losses_in(printed(SCRIPT, kind, *arguments, **env))


def torchrun(kind, *arguments, ranks=2):
    """The arguments of Python that start a training on some ranks."""
    return [*TORCHRUN, ranks, SCRIPT, kind, *arguments]


def watched(command, *, run_dir="", every=0, **env):
    """Run Python's arguments ``command`` under a watch."""
    options = ["--every", every, *(["--run-dir", run_dir] if run_dir else [])]
    return start(["-m", "evenstep.watch", *options, "--", sys.executable, *command], **env)


def losses(done):
    """What each rank printed of its losses, bit by bit."""
    assert done.returncode == 0, done.stdout + done.stderr
    return _losses_in(done.stdout)


def _losses_in(text):
    return dict(re.findall(r"^LOSSES (\d+) (.*)$", text, re.MULTILINE))


def said(done):
    """The lines of the watch, without its name."""
    return re.findall(r"^evenstep watch: (.*)$", done.stderr, re.MULTILINE)


def events(run_dir, name):
    """Events of a kind that a watch wrote."""
    lines = (Path(run_dir) / "events.jsonl").read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
