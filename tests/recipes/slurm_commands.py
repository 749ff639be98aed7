"""`srun` and `scontrol` of a stand-in for SLURM: `python slurm_commands.py srun ARGUMENTS`.

A double of a program from outside, which this machine does not have; nothing of evenstep is
replaced. All nodes are this machine. The variables are those that SLURM's documentation and source
name for a task (srun(1), heterogeneous_jobs.html; slurmstepd/task.c). As slurmstepd does, it
signals the tasks that it started and not what these started. An option that the recipes do not use
is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

JOB = "STAND_IN_FOR_SLURM"  # the file that describes the job


def hostnames(nodes):
    """``a,b[1-2]`` is a, b1, b2."""
    for name in re.findall(r"[^,\[]+(?:\[[^\]]*\])?", nodes):
        stem, _, numbers = name.rstrip("]").partition("[")
        for part in filter(None, numbers.split(",")):
            first, _, last = part.partition("-")
            yield from (f"{stem}{n}" for n in range(int(first), int(last or first) + 1))
        if not numbers:
            yield stem


def tasks_of(job, groups):
    """The environment of each task, in the order of their ranks."""
    chosen = [job["groups"][index] for index in groups]
    nodes = [(node, group) for group in chosen for node in hostnames(group["nodes"])]
    total = sum(group["tasks_per_node"] for _, group in nodes)
    rank = 0
    for number, (node, group) in enumerate(nodes):
        for local in range(group["tasks_per_node"]):
            yield {
                "SLURM_PROCID": rank,
                "SLURM_NTASKS": total,
                "SLURM_LOCALID": local,
                "SLURM_NODEID": number,
                "SLURMD_NODENAME": node,
                "SLURM_GPUS_ON_NODE": group["gpus"],
            }
            rank += 1


def srun(arguments, job):
    """Start the tasks, pass SIGTERM on, and return the highest exit code."""
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--het-group", default="0", type=lambda text: map(int, text.split(",")))
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    tasks = []

    def notify(number, frame):
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, notify)
    for names in tasks_of(job, list(options.het_group)):
        environment = os.environ | {name: str(value) for name, value in names.items()}
        tasks.append(subprocess.Popen(options.command, env=environment))
    Path(job["folder"], "srun.pid").write_text(str(os.getpid()))
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def scontrol(arguments, job):
    """`show hostnames LIST` and `requeue JOB`."""
    match arguments:
        case ["show", "hostnames", nodes]:
            print(*hostnames(nodes), sep="\n")
        case ["requeue", number] if number == os.environ["SLURM_JOB_ID"]:
            Path(job["folder"], "requeued").touch()
        case _:
            sys.exit(f"scontrol: {arguments}")
    return 0


if __name__ == "__main__":
    described = json.loads(Path(os.environ[JOB]).read_text())
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:], described))
