"""Runs of commands whose processes torch may abort after their script is through."""

import subprocess

_MOST = 4


def run(command, **settings):
    """Run a command to its end, again where torch aborted a process while Python shut down.

    Now and then under load, with plain DDP as well: a thread of gloo's lets go of a tensor, and
    Python ends it in the middle of C++. docs/faults.md says more.
    """
    for _ in range(_MOST):
        done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
        if "terminate called without an active exception" not in done.stderr:
            break
    return done
