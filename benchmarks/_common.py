"""What every benchmark shares: its options, its rows, and how they are printed."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# One BLAS thread in every process: the workers of a benchmark are the parallelism.
os.environ.setdefault("OMP_NUM_THREADS", "1")


ROOT = Path(__file__).parents[1]


def environment(*before: str) -> dict[str, str]:
    """Return the environment of processes that find this tree, after some folders."""
    path = os.pathsep.join([*before, str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of an answer: what was asked, what was measured, whether the bar was met.

    ``met`` is None where something is reported and no bar is set.
    """

    what: str
    bar: str
    measured: dict[str, Any] = field(default_factory=dict)
    met: bool | None = None

    def __post_init__(self) -> None:
        # A comparison of numpy's is no `bool`, and `is False` of none.
        object.__setattr__(self, "met", None if self.met is None else bool(self.met))


def main(
    description: str,
    rows: Callable[[argparse.Namespace], Iterable[Row]],
    add_options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Parse ``--json`` and ``--quick``, run ``rows`` and print each as it is ready.

    With ``--json`` to standard error: standard output gets one object at the end.
    Exits with 1 if a bar was missed, so that a script can tell.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, same code")
    if add_options is not None:
        add_options(parser)
    options = parser.parse_args()
    done = []
    with printing_elsewhere() if options.json else nullcontext():
        for row in rows(options):
            done.append(row)
            mark = {True: "met   ", False: "MISSED", None: "      "}[row.met]
            figures = ", ".join(f"{key} {_short(value)}" for key, value in row.measured.items())
            told = sys.stderr if options.json else sys.stdout
            print(f"{mark}  {row.what}  [{row.bar}]\n        {figures}", file=told, flush=True)
    if options.json:
        told = {"machine": _machine(), "rows": [asdict(row) for row in done]}
        print(json.dumps(told, indent=1, default=_plain))
    sys.exit(any(row.met is False for row in done))


@contextmanager
def printing_elsewhere() -> Iterator[None]:
    """Have what the block prints go to standard error, from other processes as well."""
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(answer, 1)
        os.close(answer)


def progress(text: str) -> None:
    """Say on standard error what is going on, for whatever takes longer than two seconds."""
    print(f"... {text}", file=sys.stderr, flush=True)


def bootstrap_median(values: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % limits of the median, from 2000 resamples."""
    draws = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def _plain(value: Any) -> Any:
    """Return a number or an array of numpy's as JSON has it; others have no such method."""
    return value.tolist()


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(_short(item) for item in value) + ")"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(item)}" for key, item in value.items()) + "}"
    return str(value)


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
    }
