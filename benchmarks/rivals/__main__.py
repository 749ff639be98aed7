"""Rivals of today beside plain DDP and evenstep, each in an environment of its own.

Four workers at speeds 1 : 1 : 2 : 4 train a CNN on scikit-learn's digits, by each rival in turn,
round after round. pip installs the rivals. DBS's published code is run from a clone:

    git clone https://github.com/Soptq/Dynamic_Load_Balance_DistributedDNN
    python -m benchmarks.rivals --clones .
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks._common import Row, main
from benchmarks.rivals._environments import RIVALS
from benchmarks.rivals._figures import summed_up
from benchmarks.rivals._rounds import Found, opened, run_round, write
from benchmarks.rivals._task import GLOBAL_BATCH_SIZE


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run rounds until there are as many as wanted, and say how each rival did."""
    num_rounds, num_epochs = (1, 2) if options.quick else (options.rounds, 6)
    with ExitStack() as stack:
        into = options.into or Path(stack.enter_context(TemporaryDirectory()))
        folder = options.resume or Path(stack.enter_context(TemporaryDirectory()))
        places = {"into": into.absolute(), "clones": options.clones and options.clones.absolute()}
        kept = {name: opened(name, folder, **places) for name in options.only}
        for name in order(list(kept), num_rounds):
            found = kept[name]
            if found["installed"] and len(found["rounds"]) < num_rounds:
                run_round(found, num_epochs=num_epochs, **places)
            write(found, folder)
    for name, found in kept.items():
        yield Row(f"{name}: seconds per {GLOBAL_BATCH_SIZE} samples", "reported", measured(found))


def order(names: list[str], num_rounds: int) -> Iterator[str]:
    """Yield names round after round, each time from another one on; those not timed at the end."""
    timed = [name for name in names if RIVALS[name].is_timed]
    for number in range(num_rounds):
        first = number % max(1, len(timed))
        yield from [*timed[first:], *timed[:first]]
    for name in names:
        if not RIVALS[name].is_timed:
            yield from [name] * num_rounds


def measured(found: Found) -> Found:
    """Return the figures of a rival; where there are none, the end of the error."""
    if found["error"]:
        return {"error": found["error"]}
    one = summed_up(found)
    failed = [each["error"][-300:] for each in found["rounds"] if each["status"] != "done"]
    figures = {"overall_s": one.step_s, "settled_s": one.settled_s, "accuracy": one.accuracy}
    return {**figures, "failed": one.num_failed, **({"error": failed[-1]} if failed else {})}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where environments, clones and results are, and which rivals take part."""
    add = parser.add_argument
    add("--into", type=Path, metavar="DIR", help="keeps the rivals' virtual environments")
    add("--clones", type=Path, metavar="DIR", help="has clones of rivals that no index has")
    add("--resume", type=Path, metavar="DIR", help="keeps each round, and runs those missing")
    add("--only", nargs="+", choices=RIVALS, default=list(RIVALS), metavar="NAME", help="these")
    add("--rounds", type=int, default=5, help="how often each rival trains")


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
