"""One torchrun agent per host, read and watched until all have ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let Ctrl-C, and other signals that raise in Python, wait for the end of ``with``.

    Half a namespace would be mounted after it was removed, and a process that is not written
    down would live on. Signals reach the main thread alone: in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What the system handles by itself, or a script ignores, stays as it is.
    handlers = {kind: signal.getsignal(kind) for kind in kinds}
    raising = {kind: handler for kind, handler in handlers.items() if callable(handler)}
    try:
        for kind in raising:
            signal.signal(kind, hold)
        yield
    finally:
        for kind, handler in raising.items():
            signal.signal(kind, handler)
        if waiting:
            signal.raise_signal(waiting[0])


_PORT = 29500
_PATIENCE_S = 5.0
_POLL_S = 0.05

Start = Callable[[int, list[str]], "subprocess.Popen[bytes]"]


def run_agents(
    start: Start,
    addresses: Sequence[str],
    command: Sequence[str],
    tell: Callable[[str], None],
    *,
    grace_s: float = 15.0,
) -> int:
    """Run a script on all hosts, and return 0 or the code of the agent that failed first.

    Args:
        start: starts a command on a host, its output in a pipe.
        addresses: of all hosts; agents meet at the first.
        command: the script and its arguments.
        tell: is given each line with its host's name.
        grace_s: what the others have after one failed. Workers notice closed connections at once,
            as a rule.
    """
    agents: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    saying, unheard = threading.Lock(), list[Exception]()

    def hear(host: int, agent: subprocess.Popen[bytes]) -> None:
        assert agent.stdout is not None
        with agent.stdout as lines:
            for line in lines:
                with saying:
                    if unheard:
                        continue  # an agent must not wait for a full pipe
                    try:
                        tell(f"[h{host}] {line.decode(errors='replace').rstrip()}")
                    except Exception as error:
                        unheard.append(error)

    try:
        for host in range(len(addresses)):
            with undisturbed():
                agent = start(host, _agent(host, addresses, command))
                agents.append(agent)
                reader = threading.Thread(target=hear, args=(host, agent), daemon=True)
                reader.start()
                readers.append(reader)
        code = _wait(agents, unheard, grace_s)
    finally:
        _end(agents)
        for reader in readers:
            reader.join(_PATIENCE_S)  # a worker that outlived its agent may hold the pipe
    if unheard:
        raise unheard[0]
    return code


def _agent(host: int, addresses: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return an agent's command. The static rendezvous gives host and rank the same number."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={len(addresses)}",
        f"--node-rank={host}",
        "--nproc-per-node=1",
        f"--master-addr={addresses[0]}",
        f"--master-port={_PORT}",
        f"--local-addr={addresses[host]}",
        *command,
    ]


def _wait(
    agents: Sequence[subprocess.Popen[bytes]], unheard: Sequence[Exception], grace_s: float
) -> int:
    """Wait for the end of all, for some time after the first failure, or till no reader is left."""
    failed, until_s = 0, float("inf")
    waiting = list(agents)
    while waiting and not unheard and time.monotonic() < until_s:
        time.sleep(_POLL_S)
        for agent in [agent for agent in waiting if agent.poll() is not None]:
            waiting.remove(agent)
            if agent.returncode and not failed:
                # As a shell has it for what a signal ended.
                failed = agent.returncode if agent.returncode > 0 else 128 - agent.returncode
                until_s = time.monotonic() + grace_s
    return failed


def _end(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that run still; an agent that is asked to ends its worker first."""
    for agent in agents:
        if agent.poll() is None:
            agent.terminate()
    until_s = time.monotonic() + _PATIENCE_S
    for agent in agents:
        try:
            agent.wait(max(until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
