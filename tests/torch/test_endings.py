"""No thread of ours outlives what runs at exit: Python's end would kill it in the middle of C++.

A thread that is inside torch when the interpreter ends is unwound through frames that do not
expect it, and the process aborts with "terminate called without an active exception".
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .._tiers import slow_but

SCRIPT = Path(__file__).with_name("endings.py")
SOURCE = Path(__file__).parents[2] / "src"

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("how", slow_but(["error"], ["prepared", "workers", "error"]))
def test_a_script_that_never_closes_leaves_no_thread(how):
    """Before its first step, in the middle of an epoch with loader workers, after an error."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    path = os.pathsep.join([str(SOURCE), *filter(None, sys.path)])
    processes = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": path}
        command = [sys.executable, str(SCRIPT), how]
        processes.append(
            subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    outputs = [process.communicate(timeout=120) for process in processes]

    for printed, errors in outputs:
        assert "left: []" in printed, errors
    if how != "prepared":
        assert "evenstep-channel" in outputs[0][0], "nothing to leave: the test sees nothing"
        assert "evenstep-sink" in outputs[0][0]
    if how == "workers":
        assert "evenstep-collate" in outputs[0][0]
    if how == "error":
        assert all("KeyError" in errors for _, errors in outputs)
