"""Scripts as `torchrun` starts them, in processes that have torch already."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch
from torch import distributed

from ._ports import free_port


def printed(script, *arguments, num_ranks=2, cwd=".", **env):
    """What all ranks of a script print, one after the other.

    To load torch takes ten times as long as such a training, so a fork server does it once for all
    tests. What is about a launcher or about the end of a process needs processes of its own.
    """
    port = str(free_port())
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)} | env
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(num_ranks)]
        command = [str(part) for part in (Path(script).resolve(), *arguments)]
        ranks = [
            context.Process(target=_run, args=(rank, file, command, cwd, names), daemon=True)
            for rank, file in enumerate(files)
        ]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(150)
            text = "".join(file.read_text() for file in files)
            assert [process.exitcode for process in ranks] == [0] * num_ranks, text
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return text


def _run(rank, file, command, cwd, names):
    """Run a script in this process, as a rank's main program; what it prints goes to a file."""
    torch.set_num_threads(1)
    os.environ.update(names | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.chdir(cwd)
    with file.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
    _keep_groups([])
    runpy.run_path(command[0], run_name="__main__")


def _keep_groups(kept):
    """Let no model be the last to hold a process group.

    Torch 2.13 may then wait forever: DDP's reducer joins gloo's threads and keeps the interpreter's
    lock, which such a thread needs to let go of a finished reduction.
    """
    opens = distributed.init_process_group

    def init_process_group(*args, **kwargs):
        opens(*args, **kwargs)
        kept.append(distributed.group.WORLD)

    distributed.init_process_group = init_process_group
