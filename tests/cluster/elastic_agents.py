"""Starts elastic training under torchrun, watches it, and kills parts of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from .elastic_script import GLOBAL_BATCH_SIZE, NUM_SAMPLES

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("elastic_script.py")
_POLL_S = 0.002


class Agent:
    """One torchrun, with its workers.

    Args:
        folder: where the script leaves its traces, and torchrun its words.
        steps: optimizer steps to train for.
        launch: options of torchrun.
        pause_s: what a step takes beside computing.
        name: of the log file.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        launch: list[str],
        pause_s: float = 0.0,
        name: str = "torchrun",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        # Without the first, workers meet on the store of the attempt before, and hang.
        env = os.environ | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }
        script = [str(SCRIPT), str(folder), "--steps", str(steps), "--pause-s", str(pause_s)]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *script]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, timeout_s: float) -> int:
        """Return the exit code."""
        return self.process.wait(timeout_s)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def tail(self) -> str:
        """Return the end of what it said."""
        return self.log.read_text(errors="replace")[-6000:]


@contextmanager
def ended(*agents: Agent) -> Iterator[None]:
    """Leave no process behind."""
    try:
        yield
    finally:
        for agent in agents:
            if agent.process.poll() is None:
                agent.process.terminate()  # torchrun takes its workers along
        for agent in agents:
            try:
                agent.process.wait(40)
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()


class Progress:
    """What rank 0 said so far, in every attempt.

    Args:
        folder: where the script writes.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "progress.jsonl"
        self.lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines."""
        if self._path.exists():
            text = self._path.read_text()
            complete = text[: text.rfind("\n") + 1].splitlines()
            self.lines = [json.loads(line) for line in complete]
        return self.lines

    def wait_for(self, done: Any, agent: Agent, *, timeout_s: float = 120.0) -> Any:
        """Return what ``done(lines)`` gives once that is true."""
        deadline_s = monotonic() + timeout_s
        while not (answer := done(self.read())):
            if agent.process.poll() is not None or monotonic() > deadline_s:
                raise RuntimeError(f"the run got no further:\n{agent.tail()}")
            sleep(_POLL_S)
        return answer

    def starts(self) -> list[dict[str, Any]]:
        """Return the lines of all starts."""
        return [line for line in self.lines if "started" in line]

    def newest_step(self) -> int:
        """Return the step done last, or the one started from."""
        line = self.lines[-1] if self.lines else {}
        return int(line.get("step", line.get("started", 0)))


def kill_in_turn(folder: Path, agent: Agent, *, num_kills: int, seed: int) -> list[int]:
    """Kill a random worker in each of the first attempts; return steps that were done twice."""
    progress, chance, killed_at = Progress(folder), random.Random(seed), []
    for attempt in range(num_kills):
        progress.wait_for(lambda lines, past=attempt: len(progress.starts()) > past, agent)
        start = progress.starts()[attempt]
        wanted = start["started"] + chance.randint(1, 16)
        progress.wait_for(lambda lines, wanted=wanted: progress.newest_step() >= wanted, agent)
        pids = start["pids"]
        os.kill(pids[chance.randrange(len(pids))][0], signal.SIGKILL)
        progress.read()
        killed_at.append(progress.newest_step())
    if agent.wait(600):
        raise RuntimeError(f"torchrun gave up:\n{agent.tail()}")
    progress.read()
    resumed_at = [start["started"] for start in progress.starts()[1:]]
    return [at - later for at, later in zip(killed_at, resumed_at, strict=True)]


def compare(mine: Path, other: Path) -> dict[str, Any]:
    """Return how far the ends of two runs are apart, and whether each sample counted once."""
    import torch

    ends = [torch.load(folder / "end.pt", weights_only=True) for folder in (mine, other)]
    parameters = [torch.cat([p.ravel() for p in end["model"].values()]) for end in ends]
    steps = [{s: sorted(samples) for s, samples in end["steps"].items()} for end in ends]
    return {
        "difference": float((parameters[0] - parameters[1]).norm() / parameters[1].norm()),
        "same_samples": steps[0] == steps[1],
        "each_once": each_once(steps[0]),
        "num_steps": len(steps[0]),
    }


def each_once(steps: dict[int, list[int]]) -> bool:
    """Tell whether the steps of every whole epoch hold each sample once, and others none twice."""
    each = -(-NUM_SAMPLES // GLOBAL_BATCH_SIZE)
    if sorted(steps) != list(range(len(steps))):
        return False
    for first in range(0, len(steps), each):
        epoch = [steps[step] for step in range(first, min(first + each, len(steps)))]
        samples = sorted(sample for step in epoch for sample in step)
        whole = len(epoch) == each
        if len(set(samples)) != len(samples) or (whole and samples != list(range(NUM_SAMPLES))):
            return False
        if any(len(step) != GLOBAL_BATCH_SIZE for step in epoch[: each - 1]):
            return False
    return True


class Fleet:
    """As many agents as wanted, that find each other through a store outside of them.

    Args:
        folder: where the script leaves its traces.
        steps: optimizer steps to train for.
        sizes: every number of agents that there will be.
        pause_s: what a step takes beside computing.
    """

    def __init__(self, folder: Path, *, steps: int, sizes: tuple[int, ...], pause_s: float) -> None:
        from torch.distributed import TCPStore

        # Outside of the agents: the one that hosted it could not be killed.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._launch = [
            f"--nnodes={min(sizes)}:{max(sizes)}",
            "--nproc-per-node=1",
            "--max-restarts=9",
            "--monitor-interval=0.1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._store.port}",
            "--rdzv-id=elastic",
            "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1",
        ]
        self._folder, self._steps, self._pause_s = folder, steps, pause_s
        self.agents: list[Agent] = []
        self.progress = Progress(folder)

    def start(self) -> None:
        """Start one more agent."""
        name = f"agent-{len(self.agents)}"
        agent = Agent(
            self._folder,
            steps=self._steps,
            launch=self._launch,
            pause_s=self._pause_s,
            name=name,
        )
        self.agents.append(agent)

    def resize(self, size: int) -> None:
        """Kill the agents that are too many, start those that are missing, and see it train."""
        running = [agent for agent in self.agents if agent.is_running]
        for agent in running[size:]:
            self._kill(agent)
        for _ in range(size - len(running)):
            self.start()
        self.progress.wait_for(lambda lines: self._is_training(size), self._first())

    def train(self, num_steps: int) -> None:
        """Let it get ahead by so many steps."""
        wanted = self.progress.newest_step() + num_steps
        self.progress.wait_for(lambda lines: self.progress.newest_step() >= wanted, self._first())

    def _first(self) -> Agent:
        return next(agent for agent in self.agents if agent.is_running)

    def _is_training(self, size: int) -> bool:
        starts = self.progress.starts()
        return bool(starts) and len(starts[-1]["pids"]) == size

    def _kill(self, agent: Agent) -> None:
        workers = self.progress.starts()[-1]["pids"]
        agent.process.kill()
        for pid, parent in workers:  # an agent that dies leaves its worker training
            if parent == agent.process.pid:
                os.kill(pid, signal.SIGKILL)


def change_worlds(folder: Path, *, steps: int, sizes: tuple[int, ...], pause_s: float) -> list[int]:
    """Train under as many agents as ``sizes`` says, one number after the other.

    Args:
        folder: where the script leaves its traces.
        steps: optimizer steps to train for.
        sizes: numbers of agents.
        pause_s: what a step takes beside computing.

    Returns:
        The world size of every start.
    """
    fleet = Fleet(folder, steps=steps, sizes=sizes, pause_s=pause_s)
    try:
        for size in sizes:
            fleet.resize(size)
            if size != sizes[-1]:
                fleet.train(10)
        for agent in fleet.agents:
            agent.wait(180)
    finally:
        with ended(*fleet.agents):
            pass
    fleet.progress.read()
    return [len(line["pids"]) for line in fleet.progress.starts()]
