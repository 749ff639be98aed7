"""Many more generated cases than a test run has time for, through the same property tests.

Each property generates cases that are valid by construction, which have to succeed, or invalid
ones, which have to get the documented error. The count is hypothesis's own, of cases that passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks._common import Row, main, progress

ROOT = Path(__file__).resolve().parent.parent
NOT_FUZZED = ("demo",)  # properties of the demo's arithmetic: not what the bar is about
READERS = "test_checkpoint"  # so the files are called that read what is valid and what is not
PASSED = re.compile(r"- (\d+) passing, (\d+) failing")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run every file that holds a property, each property with its part of the cases."""
    files = sorted(
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "@given(" in path.read_text() and path.parent.name not in NOT_FUZZED
    )
    wanted = 2_000 if options.quick else options.cases
    each = share(wanted, files)
    # Twice their tenth of the cases: a property that loads a checkpoint takes half its part.
    of_readers = share(wanted // 5, [path for path in files if path.name.startswith(READERS)])
    total = failures = num_read = 0
    for path in files:
        name = str(path.relative_to(ROOT))
        reads = path.name.startswith(READERS)
        num_examples = max(each, of_readers) if reads else each
        progress(f"{name}: {num_examples} cases for each property")
        done = run(path, num_examples)
        counts = PASSED.findall(done.stdout)
        passed, failed = (sum(int(pair[k]) for pair in counts) for k in (0, 1))
        total, failures = total + passed, failures + failed + (done.returncode != 0)
        num_read += passed * reads
        if done.returncode:
            print(done.stdout[-4000:], file=sys.stderr)
        yield Row(name, "every case as documented", {"passed": passed}, done.returncode == 0)
    yield Row(
        "readers of checkpoints",
        f"{wanted // 10:,} generated checkpoints, whole, damaged and forged",
        {"passed": num_read},
        failures == 0 and num_read >= wanted // 10,
    )
    yield Row(
        "all properties",
        f"{wanted:,} generated cases, none failing",
        {"passed": total, "files_with_failures": failures},
        failures == 0 and total >= wanted,
    )


def share(wanted: int, files: list[Path]) -> int:
    """Return how many cases each property of some files is to take, rounded up."""
    return -(-wanted // sum(path.read_text().count("@given(") for path in files))


def run(path: Path, num_examples: int) -> subprocess.CompletedProcess[str]:
    """Run the properties of one test file and nothing else of it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    command += ["-m", "hypothesis", "--hypothesis-show-statistics", "--timeout=3600"]
    environment = {**os.environ, "EVENSTEP_EXAMPLES": str(num_examples)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of cases."""
    parser.add_argument("--cases", type=int, default=100_000, help="cases over all properties")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
