"""Starts elastic training under torchrun, watches it, and kills parts of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from benchmarks._elastic_script import GLOBAL_BATCH_SIZE, NUM_SAMPLES

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "_elastic_script.py"
_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Kill:
    """What one kill cost.

    Attributes:
        rank: who was killed.
        at_step: last step that was done before.
        from_step: step of the checkpoint that training went on from.
        recomputed: steps done a second time.
        down_s: from the kill until training went on.
        lost_s: from the last step that counts until then: what was thrown away, as well.
        aimed: whether it hit while a checkpoint was being written.
    """

    rank: int
    at_step: int
    from_step: int
    recomputed: int
    down_s: float
    lost_s: float
    aimed: bool


class Agent:
    """One torchrun, with its workers.

    Args:
        folder: where the script leaves its traces, and torchrun its words.
        steps: optimizer steps to train for.
        launch: options of torchrun.
        pause_s: what a step takes beside computing.
        name: of the log file.
        options: more of the script's options.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        launch: list[str],
        pause_s: float = 0.0,
        name: str = "torchrun",
        options: Sequence[str] = (),
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
        script += options
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


def kill_one(
    progress: Progress, agent: Agent, folder: Path, *, attempt: int, chance: random.Random
) -> tuple[int, int, float, bool]:
    """Kill a random worker at a random moment of an attempt.

    Every fourth time, that moment is when a checkpoint is half-written.

    Returns:
        Rank, step done last, seconds since the epoch, whether a checkpoint was under way.
    """
    progress.wait_for(lambda lines: len(progress.starts()) > attempt, agent)
    start = progress.starts()[attempt]
    wanted, aimed = start["started"] + chance.randint(1, 16), attempt % 4 == 3
    if aimed:
        saved = folder / "checkpoints"
        progress.wait_for(lambda lines: any(saved.glob(".partial-*")), agent)
    else:
        progress.wait_for(lambda lines: progress.newest_step() >= wanted, agent)
        sleep(chance.uniform(0, 0.03))
    rank = chance.randrange(len(start["pids"]))
    os.kill(start["pids"][rank][0], signal.SIGKILL)
    killed_s = time()
    progress.read()
    return rank, progress.newest_step(), killed_s, aimed


def cost_of(progress: Progress, attempt: int, killed: tuple[int, int, float, bool]) -> Kill:
    """Return what a kill cost, once training has begun again."""
    rank, at_step, killed_s, aimed = killed
    before, after = progress.starts()[attempt : attempt + 2]
    from_step = int(after["started"])
    first, last = progress.lines.index(before), progress.lines.index(after)
    saved = [line for line in progress.lines[first:last] if line.get("step") == from_step]
    worthless_from_s = saved[0]["time_s"] if saved else before["time_s"]
    return Kill(
        rank=rank,
        at_step=at_step,
        from_step=from_step,
        recomputed=max(0, at_step - from_step),
        down_s=after["time_s"] - killed_s,
        lost_s=after["time_s"] - worthless_from_s,
        aimed=aimed,
    )


def kill_in_turn(folder: Path, agent: Agent, *, num_kills: int, seed: int) -> list[Kill]:
    """Kill a worker in each of the first attempts, and return what each kill cost."""
    progress, chance = Progress(folder), random.Random(seed)
    killed = [
        kill_one(progress, agent, folder, attempt=attempt, chance=chance)
        for attempt in range(num_kills)
    ]
    if agent.wait(600):
        raise RuntimeError(f"torchrun gave up:\n{agent.tail()}")
    progress.read()
    return [cost_of(progress, attempt, fact) for attempt, fact in enumerate(killed)]


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
