"""What a dead worker costs: kill -9 under torchrun, and what the parameters say afterwards."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks._common import Row, main, progress
from benchmarks._elastic import Agent, compare, ended, kill_in_turn
from benchmarks._fleet import change_worlds

PAUSE_S = 0.02


def launch(num_kills: int) -> list[str]:
    """Return torchrun's options for one agent with four workers."""
    return [
        "--standalone",
        "--nproc-per-node=4",
        f"--max-restarts={num_kills + 2}",
        "--monitor-interval=0.1",
    ]


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run undisturbed, then with kills, then with other numbers of workers, and compare."""
    num_kills = 2 if options.quick else options.kills
    steps = 40 + 8 * num_kills
    with tempfile.TemporaryDirectory() as folder:
        calm = Path(folder) / "calm"
        progress(f"{steps} steps undisturbed")
        agent = Agent(calm, steps=steps, launch=launch(0))
        with ended(agent):
            if agent.wait(600):
                raise RuntimeError(agent.tail())
        yield with_kills(Path(folder) / "killed", calm, steps, num_kills, options)
        yield with_worlds(Path(folder) / "worlds", calm, steps)


def with_kills(
    folder: Path, calm: Path, steps: int, num_kills: int, options: argparse.Namespace
) -> Row:
    """Kill one worker after another."""
    progress(f"{steps} steps with {num_kills} kills")
    agent = Agent(folder, steps=steps, launch=launch(num_kills), pause_s=PAUSE_S)
    with ended(agent):
        kills = kill_in_turn(folder, agent, num_kills=num_kills, seed=options.seed)
    found = compare(folder, calm)
    return Row(
        what=f"{num_kills} kills -9 in one run of {steps} steps, 4 workers, a checkpoint every 7",
        bar="parameters within 1e-9 of the undisturbed run, each sample counted once",
        measured={
            **found,
            "recomputed_mean": mean(kill.recomputed for kill in kills),
            "recomputed_most": max(kill.recomputed for kill in kills),
            "down_s_median": median(kill.down_s for kill in kills),
            "lost_s_median": median(kill.lost_s for kill in kills),
            "lost_s_most": max(kill.lost_s for kill in kills),
            "rank_0_killed": sum(kill.rank == 0 for kill in kills),
            "half_written": sum(kill.aimed for kill in kills),
            "kills": [asdict(kill) for kill in kills] if options.json else len(kills),
        },
        met=_is_right(found),
    )


def with_worlds(folder: Path, calm: Path, steps: int) -> Row:
    """Go from 4 agents to 3 and to 5."""
    sizes = (4, 3, 5)
    progress(f"{steps} steps on 4, 3 and 5 workers")
    worlds = change_worlds(folder, steps=steps, sizes=sizes, pause_s=PAUSE_S)
    found = compare(folder, calm)
    return Row(
        what=f"{steps} steps under 4, then 3, then 5 torchrun agents, killed and added",
        bar="parameters within 1e-9 of the undisturbed run, each sample counted once",
        measured={**found, "world_sizes": worlds},
        met=_is_right(found) and set(sizes) <= set(worlds),
    )


def _is_right(found: dict[str, Any]) -> bool:
    return bool(found["difference"] <= 1e-9 and found["same_samples"] and found["each_once"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how many workers die, and when."""
    parser.add_argument("--kills", type=int, default=20, help="workers to kill, one after another")
    parser.add_argument("--seed", type=int, default=0, help="decides who is killed, and when")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
