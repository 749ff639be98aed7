"""What every host of the network's benchmark runs: a job as JSON in, its answer as JSON out."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks._network_arena import Arena, Taken
from benchmarks._network_follow import follow
from evenstep.network import Split

SMALL = 1024  # elements: nothing but latency


def contest(settings: dict[str, Any]) -> dict[str, Any]:
    """Let shares that are given take turns, and return what each exchange was.

    Before that: what an exchange of next to nothing takes.
    """
    arena = Arena(settings["num_workers"], SMALL)
    equal = Split.of(np.full(arena.world_size, 1 / arena.world_size)).parts
    small = [arena.exchange(equal) for _ in range(9)]
    arena.resize(settings["num_elements"])
    contestants = settings["contestants"]
    taken: dict[str, list[Taken]] = {one["name"]: [] for one in contestants}
    for turn in range(-1, settings["rounds"]):  # the first one does not count
        for place in range(len(contestants)):
            one = contestants[(place + turn) % len(contestants)]
            done = arena.exchange(one["parts"], one["num_chunks"])
            if turn >= 0 and done is not None:
                taken[one["name"]].append(done)
    arena.close()
    if arena.rank:
        return {}
    return {
        "smallest_s": median(done.seconds for done in small if done is not None),
        "taken": {name: [asdict(done) for done in each] for name, each in taken.items()},
    }


JOBS = {
    "contest": contest,
    "follow": follow,
}


def run(asked: Path, answer: Path) -> None:
    """Run the job, and write what rank 0 answers."""
    settings = json.loads(asked.read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    told = JOBS[settings["job"]](settings)
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
