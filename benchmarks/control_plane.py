"""What rank 0 carries for 256 and 1,024 ranks: their start, a plan at every step, losses.

The ranks are connections without models, several to a process, over the loopback. Rank 0 is the
exchange and the planner of real runs, under a policy that makes a new plan after every step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from time import monotonic, perf_counter, sleep
from typing import Any

from benchmarks._common import Row, main, progress
from benchmarks._fake_ranks import DEADLINE_S, HEARTBEAT_S, fake, rank_0

_TIMEOUT_S = 120.0
# World size, and what may be taken: seconds of the start, seconds of CPU of a step.
SIZES = ((256, 5.0, 0.005), (1024, 20.0, 0.025))


class Ranks:
    """All ranks of a run in processes of their own: rank 0, one rank, ten ranks, all others.

    Args:
        world_size: of the run.
        num_processes: for the others.

    Attributes:
        joined_s: from the moment in which rank 0 listens until all are connected.
    """

    def __init__(self, world_size: int, *, num_processes: int = 8) -> None:  # noqa: D107
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["benchmarks._fake_ranks"])
        others = list(range(12, world_size))
        parts = [[1], list(range(2, 12)), *(others[n::num_processes] for n in range(num_processes))]
        self._fakes = [self._start(fake, part, world_size) for part in parts]
        self._fakes_ready()
        self._rank_0 = self._start(rank_0, world_size)
        meeting = heard(self._rank_0[0])
        began_s = perf_counter()
        for pipe, _ in self._fakes:
            pipe.send(meeting)
        heard(self._rank_0[0])
        self._fakes_ready()
        self.joined_s = perf_counter() - began_s

    def steps(self, number: int) -> tuple[float, float]:
        """Make steps; return rank 0's CPU seconds of one, and the planner's part of them."""
        self._rank_0[0].send(("steps", number))
        cpu_s, planning_s = heard(self._rank_0[0])
        return cpu_s, planning_s

    def stop(self, part: int, num_ranks: int) -> float:
        """Stop the process of some ranks; return the seconds until rank 0 has named them all."""
        os.kill(self._fakes[part][1].pid or 0, signal.SIGSTOP)
        began_s = monotonic()
        losses: dict[int, float] = {}
        while len(losses) < num_ranks and monotonic() - began_s < 3 * DEADLINE_S:
            sleep(0.1)
            self._rank_0[0].send("losses")
            losses = heard(self._rank_0[0])
        return max(losses.values()) - began_s if len(losses) == num_ranks else float("inf")

    def end(self, stopped: int) -> int:
        """End all; return how many processes heard of a loss."""
        num_told = 0
        for number, (pipe, _) in enumerate(self._fakes):
            if number != stopped:
                pipe.send("end")
                num_told += bool(heard(pipe))
        self._rank_0[0].send("end")
        self._rank_0[1].join(_TIMEOUT_S)
        for _, process in (*self._fakes, self._rank_0):
            process.kill()
            process.join()
        return num_told

    def _fakes_ready(self) -> None:
        for pipe, _ in self._fakes:
            heard(pipe)

    def _start(self, function: Any, *arguments: Any) -> tuple[Connection, Any]:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=function, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        return mine, process


def heard(pipe: Connection) -> Any:
    """Return what comes over a pipe in time."""
    if not wait([pipe], timeout=_TIMEOUT_S):
        raise RuntimeError(f"a process said nothing for {_TIMEOUT_S:g} s")
    return pipe.recv()


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Measure whole runs."""
    for world_size, most_s, most_cpu_s in SIZES:
        progress(f"{world_size} ranks: start, steps, the loss of one")
        ranks = Ranks(world_size)
        yield Row(
            f"{world_size} ranks: until all are connected",
            f"<= {most_s:g} s",
            {"joined_s": ranks.joined_s},
            met=ranks.joined_s <= most_s,
        )
        yield of_a_step(ranks, world_size, 30 if options.quick else 300, most_cpu_s)
        yield of_losses(ranks, world_size)


def of_a_step(ranks: Ranks, world_size: int, num_steps: int, most_cpu_s: float) -> Row:
    """Measure the CPU that steps take on rank 0."""
    ranks.steps(10)
    cpu_s, planning_s = ranks.steps(num_steps)
    return Row(
        f"{world_size} ranks: CPU of rank 0 for a step, one report from and one plan to each rank",
        f"<= {1e3 * most_cpu_s:g} ms",
        {"cpu_s": cpu_s, "of_it_planning_s": planning_s, "steps": num_steps},
        met=cpu_s <= most_cpu_s,
    )


def of_losses(ranks: Ranks, world_size: int) -> Row:
    """Stop one rank; in another run, stop ten."""
    one_s = ranks.stop(0, 1)
    sleep(HEARTBEAT_S)
    num_told = ranks.end(stopped=0)
    progress(f"{world_size} ranks: the loss of ten")
    ranks = Ranks(world_size)
    ranks.steps(3)
    ten_s = ranks.stop(1, 10)
    sleep(HEARTBEAT_S)
    num_told_of_ten = ranks.end(stopped=1)
    limit_s = DEADLINE_S + 2 * HEARTBEAT_S
    return Row(
        f"{world_size} ranks: one is stopped, and in another run ten",
        f"named within {limit_s:g} s, the deadline and two heartbeats; all others hear of it",
        {"one_s": one_s, "ten_s": ten_s, "processes_told": (num_told, num_told_of_ten)},
        met=max(one_s, ten_s) <= limit_s and num_told == num_told_of_ten == 9,
    )


if __name__ == "__main__":
    main(__doc__, rows)
