"""What ``python -m evenstep.doctor`` takes, and what it prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .._doctor import Checkup, as_text, judge, to_json
from .._render import spare_strictness, terminal_width
from ..exceptions import invalid
from ._examination import Patience, StageLine, examine, open_desk
from ._timed_step import check_step


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine this rank, and on rank 0 say what was found on all; return the exit code."""
    try:
        options = parsed(arguments)
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a step of the user's own is found there
    spare_strictness(sys.stdout)  # rather than lose what a minute has found
    patience = Patience()
    try:
        desk = open_desk(os.environ, timeout_s=patience.arrive_s)
        checkup = examine(
            desk,
            StageLine(desk.rank == 0),
            step=options.step,
            global_batch_size=options.global_batch_size,
            patience=patience,
        )
        return 0 if checkup is None else _say(checkup, options)
    except (RuntimeError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, those refused that no rank could follow.

    Raises:
        ValueError: an option is out of range, or the file cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="evenstep.doctor",
        description="Say what is wrong with the machines and links of a cluster, in a minute.",
        allow_abbrev=False,
    )
    parser.add_argument("--step", help="MODULE:FUNCTION or FILE.py:FUNCTION of one step.")
    parser.add_argument("--global-batch-size", type=int, help="Samples per step of all ranks.")
    parser.add_argument("--out", type=Path, help="File for `evenstep plan --doctor`.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead.")
    options = parser.parse_args(arguments)
    if options.step is not None:
        check_step(options.step)
    out = options.out
    if out is not None and os.environ.get("RANK", "0") == "0":
        there = out if os.path.exists(out) else out.parent
        if os.path.isdir(out) or not os.access(there, os.W_OK):
            raise _unwritten(f"{out}")  # before a run of a minute
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    total = options.global_batch_size
    if total is not None and total < ranks:
        rule = f"be at least {ranks}, a sample for each rank"
        raise invalid("evenstep doctor --global-batch-size", rule, total, "Raise it.")
    return options


def _say(checkup: Checkup, options: argparse.Namespace) -> int:
    findings = judge(checkup)
    record = to_json(checkup, findings)
    problem = None
    if options.out is not None:
        try:
            options.out.write_text(record, encoding="utf-8")
        except OSError as error:  # though it could be written when the run began
            problem = _unwritten(f"{options.out} ({error.strerror or error})")
    print(record if options.json else as_text(checkup, findings, terminal_width()) + "\n", end="")
    if problem is not None:
        print(f"Error: {problem}", file=sys.stderr)
        return 1
    if options.out is not None and not options.json:
        print(f"\nWritten to {options.out}: `evenstep plan --doctor {options.out}` reads it.")
    return 0


def _unwritten(got: str) -> ValueError:
    remedy = "Give another one: `--out doctor.json`."
    return invalid("evenstep doctor --out", "be a file to write", got, remedy)
