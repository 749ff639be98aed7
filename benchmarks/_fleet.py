"""Several torchrun agents with a worker each, of which some die and others join."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from benchmarks._elastic import Agent, Progress, ended


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

    def start(self, *options: str) -> Agent:
        """Start one more agent, whose script gets these options, too."""
        name = f"agent-{len(self.agents)}"
        agent = Agent(
            self._folder,
            steps=self._steps,
            launch=self._launch,
            pause_s=self._pause_s,
            name=name,
            options=options,
        )
        self.agents.append(agent)
        return agent

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


def change_worlds(
    folder: Path, *, steps: int, sizes: tuple[int, ...], pause_s: float, least: int = 10
) -> list[int]:
    """Train under as many agents as ``sizes`` says, one number after the other.

    Args:
        folder: where the script leaves its traces.
        steps: optimizer steps to train for.
        sizes: numbers of agents.
        pause_s: what a step takes beside computing.
        least: steps that each number but the last trains for.

    Returns:
        The world size of every start.
    """
    fleet = Fleet(folder, steps=steps, sizes=sizes, pause_s=pause_s)
    try:
        for size in sizes:
            fleet.resize(size)
            if size != sizes[-1]:
                fleet.train(least)
        for agent in fleet.agents:
            agent.wait(180)
    finally:
        with ended(*fleet.agents):
            pass
    fleet.progress.read()
    return [len(line["pids"]) for line in fleet.progress.starts()]
