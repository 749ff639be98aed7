"""Mutants drawn by a seed from the rooms that decide and train, and which test notices each.

Usage:
    python -m benchmarks._drawn_mutants --seed 1 --count 100 --out runs/kept.jsonl --tests tests/sim
    python -m benchmarks._drawn_mutants --again runs/kept.jsonl --tests @ids --out runs/gone.jsonl

The first runs the fast tests of each mutant's room, then those listed. The second runs the listed
tests alone, on what survived the first. With the ids of tests that were removed, it shows what the
tests that remain do not notice. The same seed draws the same mutants of the same source. A mutant
with a line in ``--out`` is skipped, so a run that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from bisect import bisect, bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate, pairwise, permutations
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks._common import ROOT, progress

TESTS = {
    "_diagnosis": "diagnosis exchange",
    "_exchange": "exchange torch",
    "_planner": "planner exchange torch",
    "_run": "run torch",
    "_telemetry": "telemetry export top",
    "_types.py": "policies solve timemodels",
    "claims": "claims exchange torch",
    "network": "network torch",
    "policies": "policies planner",
    "prediction": "prediction policies",
    "solve": "solve policies planner",
    "timemodels": "timemodels policies planner",
    "torch": "torch",
}
"""What is mutated in ``src/evenstep``, and the folders of its tests, nearest first."""
LEAST = 2  # mutants of each room
ONE_TEST_S, ONE_RUN_S = 120, 1200  # over either of them counts as killed
FAST = ("not slow and not cluster", "not slow and cluster")  # what starts processes comes last
_NOT_COPIED = (".git", ".venv", ".*_cache", ".hypothesis", "runs", "site", "*-pytest-*.pyc")
_PAIRS = (
    "<:<= >:>= <:>= >:<= ==:!= is:is_not in:not_in and:or +:- *:/ +=:-= *=:/= "
    "min:max minimum:maximum True:False"
)
SWAPS: dict[str, list[str]] = defaultdict(list)
for _pair in _PAIRS.split():
    for _old, _new in permutations(_pair.replace("_", " ").split(":")):
        SWAPS[_old].append(_new)
_WORDS = re.compile(rb"is not|not in|\w+|[^\w\s()]+")
# What is said to people, and what hardly changes a decision.
_SPOKEN = {"critical", "debug", "error", "exception", "info", "invalid", "warn", "warning"}
_OPTIONS = {"daemon", "name", "stacklevel", "strict"}
_FIELDS = {"annotation", "bases", "decorator_list", "returns"}
Span = Callable[[Any], tuple[int, int]]  # where a node begins and ends
Change = tuple[int, int, list[str]]  # from, to, and what can stand there instead


@dataclass(frozen=True)
class Mutant:
    """One place where the source is changed.

    Attributes:
        file: below the root of the tree.
        line: the first that differs, from 1.
        old: the whole lines that stand there.
        new: what they are replaced by.
    """

    file: str
    line: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {old} -> {new}"

    def apply(self, text: str) -> str:
        """Return the text of its file with the change."""
        before = "".join(text.splitlines(keepends=True)[: self.line - 1])
        if not text.startswith(self.old, len(before)):
            raise LookupError(f"Something else stands in this tree than in {self}")
        return before + self.new + text[len(before) + len(self.old) :]


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Return ``count`` mutants of the source in ``root``: ``LEAST`` of each room, others of any.

    Places are as likely as each other, and so are the changes that one place allows.
    """
    generator = random.Random(seed)
    drawn, rest = [], []
    for found in places(root).values():
        generator.shuffle(found)
        drawn += found[:LEAST]
        rest += found[LEAST:]
    drawn += generator.sample(rest, min(max(count - len(drawn), 0), len(rest)))
    return [generator.choice(changes) for changes in drawn[:count]]


def places(root: Path) -> dict[str, list[list[Mutant]]]:
    """Return the places that can be changed, by room, with the changes that each allows."""
    found: dict[str, list[list[Mutant]]] = defaultdict(list)
    for path in sorted((root / "src" / "evenstep").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if room := room_of(file):
            found[room] += _places(file, path.read_bytes())
    return found


def room_of(file: str) -> str:
    """Return the room of a file below the root, a folder of torch for itself; none is empty."""
    top, *rest = Path(file).parts[2:]
    return "" if top not in TESTS else f"{top}/{rest[0]}" if top == "torch" and rest[1:] else top


def _places(file: str, data: bytes) -> Iterator[list[Mutant]]:
    starts = [0, *accumulate(map(len, data.splitlines(keepends=True)))]

    def span(node: Any) -> tuple[int, int]:
        begin, end = starts[node.lineno - 1], starts[node.end_lineno - 1]
        return begin + node.col_offset, end + node.end_col_offset

    for node in _nodes(ast.parse(data)):
        for start, end, news in (*_swapped(node, data, span), *_replaced(node, data, span)):
            first, last = bisect(starts, start) - 1, bisect_left(starts, end)
            ends = data[starts[first] : start], data[end : starts[last]]
            old = data[starts[first] : starts[last]].decode()
            yield [Mutant(file, first + 1, old, new.encode().join(ends).decode()) for new in news]


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it, without types and what is said to people."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.If(test=ast.Name("TYPE_CHECKING")):
            return
        case ast.Assign(targets=[ast.Name("__all__" | "__slots__")]):
            return
        case ast.keyword(name) if name in _OPTIONS:
            return
        case ast.Expr(ast.Call(f)) | ast.Call(f) if ast.unparse(f).rpartition(".")[2] in _SPOKEN:
            return
    yield node
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in _FIELDS:
                yield from _nodes(child)


def _swapped(node: ast.AST, data: bytes, span: Span) -> Iterator[Change]:
    """Yield the operators and names of a node that have others."""
    match node:
        case ast.Compare(left, _, others):
            sides = [left, *others]
        case ast.BinOp(left, _, right) | ast.AugAssign(left, _, right):
            sides = [left, right]
        case ast.BoolOp(_, values):
            sides = values
        case ast.Name() | ast.Attribute() | ast.Constant(bool()):
            begin, end = span(node)
            word = data[begin:end].decode().rpartition(".")[2]
            if word in SWAPS:
                yield end - len(word), end, SWAPS[word]
            return
        case _:
            return
    for (_, begin), (end, _) in pairwise(map(span, sides)):
        token = _WORDS.search(data, begin, end)
        if token and (news := SWAPS.get(token[0].decode())):
            yield *token.span(), news


def _replaced(node: ast.AST, data: bytes, span: Span) -> Iterator[Change]:
    """Yield a node that is replaced as a whole."""
    match node:
        case ast.UnaryOp(ast.Not()):
            yield span(node)[0], span(node)[0] + len("not "), [""]
        case ast.Constant(int(value) | float(value)) if not isinstance(value, bool):
            yield *span(node), [repr(type(value)(0) if value == 1 else value + 1)]
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield *span(node), ["return None"]
        case ast.Expr(ast.Call()):
            yield *span(node), ["pass"]
        # A comparison, or what is negated, has a change of its own that does the same.
        case ast.If(test) | ast.IfExp(test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            begin, end = span(test)
            yield begin, end, [f"not ({data[begin:end].decode()})"]


class Trial:
    """Tests run on copies of a tree, each with one mutant.

    Args:
        whole: the tree as it is.
        listed: what else pytest gets, after the tests of a mutant's room.
        only_listed: whether the tests of its room are left out.
    """

    def __init__(self, whole: Path, listed: list[str], *, only_listed: bool) -> None:
        self._whole, self._only_listed = whole, only_listed
        by_name = any(text.startswith("@") or "::" in text for text in listed)
        self._listed = listed if by_name or not listed else ["-m", "not slow", *listed]
        self._passes = cache(lambda test: run_tests(whole, [test])[0] == 0)

    def result(self, mutant: Mutant) -> dict[str, Any]:
        """Return what came of a mutant, as a line of the results."""
        began_s = monotonic()
        outcome, test = "survived", ""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            tree = Path(folder, "tree")
            shutil.copytree(self._whole, tree)
            file = tree / mutant.file
            file.write_text(mutant.apply(file.read_text("utf-8")), "utf-8")
            for arguments in self._runs(mutant):
                outcome, test = self._first_failure(tree, arguments)
                if outcome != "survived":
                    break
        told = {"shown": str(mutant), "outcome": outcome, "killed_by": test}
        return told | {"seconds": round(monotonic() - began_s, 1), "mutant": asdict(mutant)}

    def _runs(self, mutant: Mutant) -> Iterator[list[str]]:
        """Yield the arguments of each run of pytest, files with a name of the module's first."""
        body = ast.parse((self._whole / mutant.file).read_text("utf-8")).body
        names = {Path(mutant.file).stem.strip("_")} | {getattr(node, "name", "") for node in body}
        folders = "" if self._only_listed else TESTS[room_of(mutant.file).partition("/")[0]]
        for folder in folders.split():
            files = sorted((self._whole / "tests" / folder).rglob("test_*.py"))
            files.sort(key=lambda file: names.isdisjoint(re.split(r"\W+", file.read_text("utf-8"))))
            paths = [str(file.relative_to(self._whole)) for file in files]
            yield from (["-m", marks, *paths] for marks in FAST if paths)
        if self._listed:
            yield self._listed

    def _first_failure(self, tree: Path, arguments: list[str]) -> tuple[str, str]:
        """Return what came of a run.

        A test counts that fails twice, and passes without the mutant: on a busy machine, some fail
        by chance. Others are left out.
        """
        while True:
            status, test = run_tests(tree, arguments)
            if status in (0, 5):  # all passed; there are none
                return "survived", ""
            if status is None:
                return "timeout", ""
            if not test or (self._passes(test) and run_tests(tree, [test])[0] != 0):
                return "killed", test or f"pytest ended with {status}"
            progress(f"{test} fails without the mutant, or not always: it does not count")
            arguments = [*arguments, "--deselect", test]


def run_tests(tree: Path, arguments: list[str]) -> tuple[int | None, str]:
    """Return pytest's exit status in a tree, None past the limit, and the first test that failed.

    A tree has tests of its own: some put the source beside them before all other paths.
    """
    env = os.environ | {"EVENSTEP_EXAMPLES": "12", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join((str(tree / "src"), str(tree)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as kept:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--hypothesis-seed=0"]
        command += [f"--timeout={ONE_TEST_S}", "-o", f"cache_dir={kept}", *arguments]
        child = subprocess.Popen(
            command, cwd=tree, env=env, stdout=subprocess.DEVNULL, start_new_session=True
        )
        status = None
        with suppress(subprocess.TimeoutExpired):
            status = child.wait(ONE_RUN_S)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with what it left behind
        child.wait()
        failed = Path(kept, "v", "cache", "lastfailed")
        tests = json.loads(failed.read_text("utf-8")) if failed.exists() else {}
        return status, next(iter(tests), "")


def keep(trial: Trial, mutants: list[Mutant], out: Path, jobs: int) -> None:
    """Add a line to ``out`` for each mutant that has none yet."""
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {row["shown"] for row in read(out)}
    pool = ThreadPoolExecutor(jobs)
    try:
        left = [pool.submit(trial.result, one) for one in mutants if str(one) not in done]
        for row in (future.result() for future in as_completed(left)):
            progress(f"{row['outcome']} {row['seconds']} s  {row['shown']}  {row['killed_by']}")
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    finally:
        pool.shutdown(cancel_futures=True)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the results in a file, none if it is not there."""
    text = file.read_text("utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def main() -> None:
    """Draw or read mutants, run tests on those without a result, and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--again", type=Path, help="only what survived in this file of results")
    parser.add_argument("--tests", nargs="*", default=[], help="more tests: folders, ids, @FILE")
    parser.add_argument("--only-listed", action="store_true", help="leave out the room's tests")
    parser.add_argument("--out", type=Path, help="results; without it, mutants are only printed")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    mutants = draw(ROOT, options.seed, options.count)
    if options.again:
        survived = [row for row in read(options.again) if row["outcome"] == "survived"]
        mutants = [Mutant(**row["mutant"]) for row in survived]
    if options.out is None:
        print(*mutants, sep="\n")
        return
    listed = [f"@{Path(text[1:]).resolve()}" if text[0] == "@" else text for text in options.tests]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        shutil.copytree(ROOT, whole, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        if listed and run_tests(whole, ["--collect-only", *listed])[0] != 0:
            sys.exit(f"pytest does not find all of {options.tests}. Mend the list.")
        trial = Trial(whole, listed, only_listed=options.only_listed or bool(options.again))
        keep(trial, mutants, options.out, options.jobs)
    outcomes = {row["shown"]: row["outcome"] for row in read(options.out)}
    counted = Counter(outcomes[str(mutant)] for mutant in mutants)
    print(*(f"{outcome} {count}" for outcome, count in sorted(counted.items())), sep=", ")


if __name__ == "__main__":
    main()
