"""evenstep inside Ray Train: its own example, a killed worker, and nodes that come and go."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._common import Row, main, progress
from benchmarks._ray_runs import run


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run both kinds of training, each on a local cluster of its own."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "steady"
        where.mkdir()
        progress("Ray's example on three workers")
        slope_s = 0.05 if options.quick else 0.1
        yield from example(run("steady", where, timeout_s=600, slope_s=slope_s))
        where = Path(folder) / "elastic"
        where.mkdir()
        progress("a kill, a node that comes, and its loss")
        yield elastic(run("elastic", where, timeout_s=600))


def example(found: dict[str, Any]) -> Iterator[Row]:
    """Return the rows of the published example."""
    yield Row(
        "Ray's PyTorch example, beside the one that is installed",
        "<= 5 changed lines",
        {"lines": len(found["lines"]), "they are": found["lines"]},
        met=len(found["lines"]) <= 5,
    )
    yield Row(
        "its parameters after 2 epochs in fp64, beside one process on the same global batches",
        "relative difference <= 1e-9",
        {"difference": found["difference"], "mean_sizes": _mean_sizes(found)},
        met=found["difference"] <= 1e-9,
    )
    ratio = found["step_s"] / found["optimum_s"]
    yield Row(
        "its steps on 3 workers of speeds 1 : 2 : 4, which sleep",
        "median step after the fifth <= 1.10 x the optimum",
        {"ratio": ratio} | {name: found[name] for name in ("step_s", "optimum_s", "equal_s")},
        met=ratio <= 1.10,
    )


def elastic(found: dict[str, Any]) -> Row:
    """Return the row of the elastic run."""
    right = found["difference"] <= 1e-9 and found["same_samples"] and found["each_once"]
    return Row(
        "2 workers, one killed; then 3, as a node comes; then 2, as it is lost",
        "parameters within 1e-9 of plain training, each sample counted once",
        {name: value for name, value in found.items() if name not in ("sizes", "seconds")},
        met=right and found["worlds"] == [2, 2, 3, 2],
    )


def _mean_sizes(found: dict[str, Any]) -> list[float]:
    return [mean(sizes) for sizes in zip(*found["sizes"], strict=True)]


if __name__ == "__main__":
    main(__doc__, rows)
