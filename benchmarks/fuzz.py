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
PASSED = re.compile(r"- (\d+) passing, (\d+) failing")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Run every file that holds a property, each property with its part of the cases."""
    files = sorted(
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "@given(" in path.read_text() and path.parent.name not in NOT_FUZZED
    )
    num_properties = sum(path.read_text().count("@given(") for path in files)
    wanted = 2_000 if options.quick else options.cases
    each = -(-wanted // num_properties)
    total = failures = 0
    for path in files:
        name = str(path.relative_to(ROOT))
        progress(f"{name}: {each} cases for each property")
        done = run(path, each)
        counts = PASSED.findall(done.stdout)
        passed, failed = (sum(int(pair[k]) for pair in counts) for k in (0, 1))
        total, failures = total + passed, failures + failed + (done.returncode != 0)
        if done.returncode:
            print(done.stdout[-4000:], file=sys.stderr)
        yield Row(name, "every case as documented", {"passed": passed}, done.returncode == 0)
    yield Row(
        "all properties",
        f"{wanted:,} generated cases, none failing",
        {"passed": total, "files_with_failures": failures},
        failures == 0 and total >= wanted,
    )


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
