"""Commands of recipes, started in a folder with a `train.py`, and what they print."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from .._ports import free_port
from .._snippets import ROOT
from . import slurm_commands


def write_script(folder, steps):
    """Put a `train.py` into ``folder`` that is the example, for so many steps."""
    script = ROOT / "examples" / "on_a_cluster.py"
    (folder / "train.py").write_text(
        "import runpy, sys\n"
        f"sys.argv += ['--steps', '{steps}', '--save-every', '20']\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )


def environment(**names):
    """That of this process, with this tree and its Python's programs, and nothing of torchrun."""
    programs = Path(sys.executable).parent
    return os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in names.items()},
    }


class Started:
    """A process, its output in a file, and its end."""

    def __init__(self, command, folder, names):
        self.output = folder / f"output-{time.monotonic_ns()}"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=folder, env=names, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def text(self):
        return self.output.read_text()

    def wait_for(self, words, timeout_s=120):
        """Wait until the output has ``words``."""
        end = time.monotonic() + timeout_s
        while words not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.02)

    def wait(self, timeout_s=120):
        """The exit code."""
        return self.process.wait(timeout_s)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Slurm:
    """A stand-in for `sbatch`, with `srun` and `scontrol` on the path of what it starts.

    Args:
        folder: where jobs run, and what they write.
    """

    def __init__(self, folder):
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        for name in ("srun", "scontrol"):
            program = self.programs / name
            command = shlex.join([sys.executable, slurm_commands.__file__, name])
            program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def submit(self, script, *, restarts=0):
        """Start a batch script; ``restarts`` is how often it was requeued."""
        groups = [self._group(options, n) for n, options in enumerate(directives(script))]
        job = self.folder / "job.json"
        job.write_text(json.dumps({"groups": groups, "folder": str(self.folder)}))
        (self.folder / "requeued").unlink(missing_ok=True)
        names = {
            slurm_commands.JOB: job,
            "SLURM_JOB_ID": 770000 + free_port() - 20000,
            **({"SLURM_RESTART_COUNT": restarts} if restarts else {}),
            **self._variables(groups),
        }
        names["PATH"] = f"{self.programs}{os.pathsep}{environment()['PATH']}"
        path = self.folder / "job.sh"
        path.write_text(script)
        return Started(["bash", str(path)], self.folder, environment(**names))

    def notify(self):
        """SIGTERM to the tasks, as `--signal=TERM@180` sends before the end."""
        os.kill(int((self.folder / "srun.pid").read_text()), signal.SIGTERM)

    @property
    def requeued(self):
        return (self.folder / "requeued").exists()

    def _group(self, options, number):
        return {
            "nodes": f"127.0.{number}.[1-{options.nodes}]",
            "tasks_per_node": options.ntasks_per_node,
            "gpus": int(options.gres.rpartition(":")[2]),
            "num_nodes": options.nodes,
        }

    def _variables(self, groups):
        """What the batch script sees: with a number at the end where there are several groups."""
        return {
            name + (f"_HET_GROUP_{number}" if len(groups) > 1 else ""): value
            for number, group in enumerate(groups)
            for name, value in {
                "SLURM_JOB_NODELIST": group["nodes"],
                "SLURM_JOB_NUM_NODES": group["num_nodes"],
                "SLURM_CPUS_PER_TASK": 1,  # what this machine has for each
            }.items()
        }


def directives(script):
    """The options of each group of a batch script; one that sbatch(1) lacks is an error."""
    parser = argparse.ArgumentParser("sbatch", allow_abbrev=False)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ntasks-per-node", type=int, required=True)
    parser.add_argument("--cpus-per-task", type=int, required=True)
    parser.add_argument("--gres", required=True)
    parser.add_argument("--time")
    parser.add_argument("--signal", choices=["TERM@180"])
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--open-mode", choices=["append", "truncate"])
    words = [[]]
    for line in script.splitlines()[1:]:
        if not line.startswith("#"):  # sbatch reads no further
            break
        options = shlex.split(line.removeprefix("#SBATCH"))
        if options == ["hetjob"]:
            words.append([])
        else:
            words[-1] += options
    return [parser.parse_args(each) for each in words]
