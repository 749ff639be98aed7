"""No thread of ours outlives what runs at exit: Python's end would kill it in the middle of C++.

A thread that is inside torch when the interpreter ends is unwound through frames that do not
expect it, and the process aborts with "terminate called without an active exception".
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from .._ports import free_port

SCRIPT = Path(__file__).with_name("endings.py")
SOURCE = Path(__file__).parents[2] / "src"

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def ended(how):
    """Run both ranks of the script; return how each ended, what it printed, and its errors."""
    port = str(free_port())
    path = os.pathsep.join([str(SOURCE), *filter(None, sys.path)])
    processes = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": path}
        command = [sys.executable, str(SCRIPT), how]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(
            subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes)
        )
    try:
        for process in processes:
            process.wait(timeout=90)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # loader workers too, which hold the pipes
        texts = [process.communicate() for process in processes]
    return [(one.returncode, *text) for one, text in zip(processes, texts, strict=True)]


@pytest.mark.parametrize("how", ["prepared", "workers", "error"])
def test_a_script_that_never_closes_leaves_no_thread(how):
    """Before its first step, in the middle of an epoch with loader workers, after an error."""
    outputs = [texts for _, *texts in ended(how)]

    for printed, errors in outputs:
        assert "left: []" in printed, errors
    if how != "prepared":
        assert "evenstep-channel" in outputs[0][0], "nothing to leave: the test sees nothing"
        assert "evenstep-sink" in outputs[0][0]
    if how == "workers":
        assert "evenstep-collate" in outputs[0][0]
    if how == "error":
        assert all("KeyError" in errors for _, errors in outputs)


@pytest.mark.parametrize("whose", ["stuck worker", "stuck worker of its own"])
def test_a_process_whose_loader_worker_is_stuck_ends_with_the_others(whose):
    """Python waits at its end for a worker that was stopped, and would do so forever."""
    for code, _, errors in ended(whose):
        assert code == 1, errors
        assert "WorkerLostError: Rank 1 on " in errors


@pytest.mark.parametrize("how", ["fork exit", "fork error", "fork twice"])
def test_a_forked_child_that_ends_is_no_rank_that_ends(how):
    """It shares the sockets of its parent, whose run goes on as if there were no child."""
    for code, printed, errors in ended(how):
        assert code == 0, errors
        assert "trained 7" in printed
        assert "rank" not in errors.replace("[rank", "").lower(), errors
