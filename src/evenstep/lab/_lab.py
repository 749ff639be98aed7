"""Hosts on one machine: made by ``with``, gone after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Self, final

from .._install import install_line
from .._types import check_range
from .._warning import warn
from ..exceptions import invalid
from ._built import Built, address_of, described, environment
from ._cpu_groups import find_cpu_groups
from ._host import (
    MAX_HOSTS,
    Host,
    LabUnavailable,
    check_cores,
    check_machine,
    cpus_of,
    rate_of,
)
from ._links import INTERFACE, Traffic, traffic
from ._trace import Change


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


def run_agents(
    start: Callable[[int, list[str]], subprocess.Popen[bytes]],
    addresses: Sequence[str],
    command: Sequence[str],
    write: Callable[[str], None],
    *,
    grace_s: float = 15.0,
) -> int:
    """Run a script on all hosts, and return 0 or the code of the agent that failed first.

    Args:
        start: starts a command on a host, its output in a pipe.
        addresses: of all hosts; agents meet at the first.
        command: the script and its arguments.
        write: is given each line with its host's name.
        grace_s: what the others have after one failed. Workers notice closed connections at once,
            as a rule.
    """
    agents: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    saying, unheard = threading.Lock(), list[Exception]()

    def read_lines(host: int, agent: subprocess.Popen[bytes]) -> None:
        assert agent.stdout is not None
        with agent.stdout as lines:
            for line in lines:
                with saying:
                    if unheard:
                        continue  # an agent must not wait for a full pipe
                    try:
                        write(f"[h{host}] {line.decode(errors='replace').rstrip()}")
                    except Exception as error:
                        unheard.append(error)

    try:
        for host in range(len(addresses)):
            with undisturbed():
                agent = start(host, _agent(host, addresses, command))
                agents.append(agent)
                reader = threading.Thread(target=read_lines, args=(host, agent), daemon=True)
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


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End those that run still; an agent that is asked to ends its worker first."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until_s = time.monotonic() + _PATIENCE_S
    for process in processes:
        try:
            process.wait(max(until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def playing(lab: Lab, trace: Sequence[Change]) -> Iterator[None]:
    """Carry out a trace in a thread of its own, from ``with`` to its end or the trace's.

    What the trace has at 0 is in force when ``with`` begins. What fails later is raised at its end.

    Args:
        lab: whose links and quotas change.
        trace: what becomes of them, in the order of their times, which count from ``with``.
    """
    for change in trace:
        if change.at_s == 0:
            _apply(lab, change)
    ended = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="evenstep-lab-trace") as thread:
        later = sorted((one for one in trace if one.at_s > 0), key=lambda one: one.at_s)
        played = thread.submit(_play, lab, later, ended)
        try:
            yield
        except BaseException as error:
            ended.set()
            if (failure := played.exception()) is not None:
                error.add_note(f"The trace ended early: {failure}")
            raise
        ended.set()
        played.result()


def _play(lab: Lab, changes: Sequence[Change], ended: threading.Event) -> None:
    began_s = time.monotonic()
    for change in changes:
        if ended.wait(max(began_s + change.at_s - time.monotonic(), 0.0)):
            return
        _apply(lab, change)


def _apply(lab: Lab, change: Change) -> None:
    if change.mbit is not None:
        lab.set_mbit(change.host, change.mbit)
    if change.cpus is not None:
        lab.set_cpus(change.host, change.cpus)


@final
class Lab:
    """A cluster on one machine, from ``with`` to its end. Linux and root only.

    Each host is a network namespace with one link, ``eth0``, to a bridge in a separate namespace,
    shaped in both directions, and a control group with a CPU quota. Hosts reach each other and
    themselves, and nothing else. Files, memory and processes are the machine's.

    At the end of ``with``, also by an error, the processes on all hosts are ended and everything is
    removed. ``clean`` does this for a process that was killed.

    Usage:
        with Lab([Host(mbit=200), Host(mbit=50, cpus=0.5)]) as lab:
            code = lab.torchrun(["train.py"])

    Args:
        hosts: 1 to 250 hosts.
        delay_ms: delay of every packet on its way out of its host, at least 0; a round trip takes
            twice that. Needs a kernel with netem.

    Raises:
        ValueError: an argument is out of range.
        LabUnavailable: at ``with``: this machine cannot make a lab; the message has the remedy.
    """

    def __init__(self, hosts: Sequence[Host], *, delay_ms: float = 0.0) -> None:
        if not 1 <= len(hosts) <= MAX_HOSTS:
            rule = f"hold 1 to {MAX_HOSTS} hosts"
            raise invalid("Lab(hosts=...)", rule, len(hosts), "Give a Host for each.")
        check_range("Lab(delay_ms=...)", delay_ms, "in [0, 10000]", "0 delays nothing.")
        self._hosts = list(hosts)
        self._delay_ms = delay_ms
        self._processes: list[subprocess.Popen[bytes]] = []
        self._changing = threading.Lock()
        self._built: Built | None = None

    def __enter__(self) -> Self:
        if self._built is not None:
            remedy = "Make a second Lab, or end the first `with`."
            raise invalid("Lab", "be in one `with` at a time", "a second one", remedy)
        check_machine()
        warning = check_cores(self._hosts, len(os.sched_getaffinity(0)))
        if warning is not None:
            warn(warning)
        groups = find_cpu_groups(Path("/proc/self/mountinfo").read_text(encoding="utf-8"))
        if groups is not None and not os.access(groups, os.W_OK):
            groups = None  # read-only, as in a container with a few capabilities
        if groups is None and any(host.cpus is not None for host in self._hosts):
            message = (
                "`Host(cpus=...)` needs control groups with the CPU's, and none is mounted that "
                "can be written to. Mount them, start a container with `docker run --privileged`, "
                "or leave `cpus` out."
            )
            raise LabUnavailable(message)
        try:
            with undisturbed():
                self._built = described(len(self._hosts), groups)
                self._built.make(self._hosts, delay_ms=self._delay_ms)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._remove()

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts as they are now, after changes."""
        return tuple(self._hosts)

    @property
    def run_id(self) -> str:
        """This lab's own part of the names of all that it makes."""
        return self._running("run_id").run_id

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host, which all others reach."""
        return address_of(self._checked("address", host))

    def start(
        self,
        host: int,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, and return at once.

        It is in the host's namespace and group before it is the command. Hosts are called
        ``lab-h0``, ``lab-h1``, ... and find each other by these names; gloo, NCCL and TensorPipe
        are set to use ``eth0``. A command that cannot be started ends with 127 or 126, as in a
        shell. It leads a session of its own: Ctrl-C in a terminal is left to its holder, which
        ends it at its own end.

        Args:
            host: which one, from 0.
            command: program and arguments.
            env: added to the environment of this process, over what the lab sets.
            popen: other arguments of ``subprocess.Popen``.

        Raises:
            ValueError: there is no such host.
        """
        entering = self._running("start").entering(self._checked("start", host))
        with undisturbed():
            process = subprocess.Popen(
                [*entering, *command],
                env={**os.environ, **environment(), **(env or {})},
                **{"start_new_session": True, **popen},
            )
            self._processes.append(process)
        return process

    def torchrun(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        trace: Sequence[Change] = (),
        write: Callable[[str], None] = print,
    ) -> int:
        """Run a script by torchrun on all hosts, one worker each, and wait for its end.

        Rank and host are the same number. Each host has an agent; they meet at the first host's
        address. Once an agent has failed the others have a few seconds, then they are ended.

        Args:
            command: the script and its arguments, or ``-m module ...``.
            env: added to the environment of this process. ``OMP_NUM_THREADS`` is 1 unless it says
                otherwise.
            trace: changes that are carried out from the moment the agents start.
            write: is given each line that they print, with the name of its host before it; from
                other threads, but never twice at once.

        Returns:
            0 if all went well, else the code of the agent that failed first.

        Raises:
            LabUnavailable: there is no torch.
            ValueError: the trace names hosts that are not there.
        """
        self._running("torchrun")
        if find_spec("torch") is None:
            raise LabUnavailable(f"`Lab.torchrun` needs PyTorch: `{install_line('torch')}`.")
        if not command:
            raise invalid("Lab.torchrun(command=...)", "name a script", "nothing", "Add one.")
        addresses = [self.address(host) for host in range(len(self._hosts))]

        def start(host: int, words: list[str]) -> subprocess.Popen[bytes]:
            settings = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            return self.start(host, words, env=settings, stdin=subprocess.DEVNULL, **pipes)

        with self.play(trace):
            return run_agents(start, addresses, command, write)

    def play(self, trace: Sequence[Change]) -> AbstractContextManager[None]:
        """Return what carries out changes while its ``with`` lasts.

        What the trace has at 0 is in force when ``with`` begins, and what has the same time is done
        in the order given.

        Raises:
            ValueError: the trace names hosts that are not there.
        """
        self._running("play")
        for change in trace:
            self._checked("play", change.host)
        return playing(self, trace)

    def set_mbit(self, host: int, mbit: float | tuple[float, float] | None) -> None:
        """Change a link while it is used, from now on; what queues already stays queued.

        Args:
            host: which one, from 0.
            mbit: as for ``Host``; None no longer shapes it.

        Raises:
            ValueError: there is no such host, or the rate is out of range.
        """
        built, number = self._running("set_mbit"), self._checked("set_mbit", host)
        rate = None if mbit is None else rate_of("Lab.set_mbit(mbit=...)", mbit)
        with self._changing:
            before = self._hosts[number]
            built.shape(number, before.mbit, rate, delayed=self._delay_ms > 0)
            self._hosts[number] = Host(cpus=before.cpus, mbit=rate)

    def set_cpus(self, host: int, cpus: float | None) -> None:
        """Change a quota, from now on.

        Args:
            host: which one, from 0.
            cpus: as for ``Host``; None takes whatever is free.

        Raises:
            ValueError: there is no such host, or the quota is out of range.
            LabUnavailable: this machine has no quotas.
        """
        built, number = self._running("set_cpus"), self._checked("set_cpus", host)
        quota = None if cpus is None else cpus_of("Lab.set_cpus(cpus=...)", cpus)
        with self._changing:
            built.set_cpus(number, quota)
            self._hosts[number] = Host(cpus=quota, mbit=self._hosts[number].mbit)

    def interface_bytes(self, host: int) -> Traffic:
        """Return what a host has sent and received since the lab began, headers included.

        What its link dropped on the way out was not sent.

        Raises:
            ValueError: there is no such host.
        """
        namespace = self._running("interface_bytes").host(self._checked("interface_bytes", host))
        return traffic(namespace, INTERFACE)

    def _remove(self) -> None:
        """End the processes, first asking them to, and remove everything."""
        with undisturbed():
            _end(self._processes)
            self._processes.clear()
            built, self._built = self._built, None
            if built is not None:
                built.remove()

    def _running(self, method: str) -> Built:
        if self._built is None:
            rule = "be called between the beginning and the end of `with`"
            raise invalid(f"Lab.{method}", rule, "a lab that is not there", "Use `with Lab(...)`.")
        return self._built

    def _checked(self, method: str, host: int) -> int:
        rule = f"in [0, {len(self._hosts) - 1}]"
        check_range(f"Lab.{method}(host=...)", host, rule, "Hosts count from 0.")
        return int(host)
