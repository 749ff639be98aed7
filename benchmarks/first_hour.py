"""Type every command and install line of the first pages into a fresh clone, as it stands.

Lines are taken from the pages, so that one which is added is run as well: what follows ``$`` in a
console block, and code in a sentence that begins with the name of a program. ``make`` sets up its
own environment in the clone; other lines are typed into one that has PyTorch alone, as the pages
say, in their order. Wanted: git, make, Python 3.11, and an index to install from. What is not
committed is not in the clone.

    python -m benchmarks.first_hour [--quick] [--json]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from benchmarks._common import ROOT, Row, main, progress

PAGES = "README.md", "CONTRIBUTING.md", "docs/index.md"
PROGRAMS = "make", "pip", "evenstep", "torchrun", "git"
NOT_RUN = {
    "make bench": "takes hours; each benchmark has its own runs",
    "make evidence": "takes hours, this benchmark included",
}
NOT_QUICK = {
    "make test": "takes minutes, and --quick was asked for",
    "make test TESTS=all": "takes minutes, and --quick was asked for",
}
MOST_BYTES = 1_000_000_000
UNWANTED = "tensorflow", "transformers", "nvidia"


def lines_of(page: Path) -> Iterator[str]:
    """Yield the commands that a page tells its reader to type, in order and without comments.

    Not the text of a link, nor where ``...`` stands for what is the reader's own.
    """
    begins = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)})(?: |$)")
    wanted = re.compile(r"^```console\n(.*?)^```|(?<![`\[])`([^`\n]+)`(?!`)", re.DOTALL | re.M)
    for block, code in wanted.findall(page.read_text("utf-8")):
        typed = re.findall(r"^\$ (.*?)(?: +#.*)?$", block, re.M) if block else [code]
        yield from (line for line in typed if begins.match(line) and "..." not in line)


class Newcomer:
    """A reader with a fresh clone, and an environment that has the pinned PyTorch and no more.

    Args:
        folder: where both are made.
    """

    def __init__(self, folder: Path) -> None:  # noqa: D107  # the class says it
        self.clone, self._venv = folder / "evenstep", folder / "venv"
        self._index = (ROOT / "docs/index.md").read_text("utf-8")
        _checked("git", "clone", "--quiet", ROOT, self.clone)
        _checked(_base_python(), "-m", "venv", self._venv)
        self.type("pip install --constraint constraints.txt torch").check_returncode()

    def type(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line in the clone, with the empty environment's programs before the machine's."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        ours = str(Path(sys.prefix) / "bin")
        others = [part for part in env["PATH"].split(os.pathsep) if part != ours]
        env["PATH"] = os.pathsep.join([str(self._venv / "bin"), *others])
        env["MAKEFLAGS"] = ""  # of a make that started this
        where = self._folder_of_script() if "script.py" in line else self.clone
        return subprocess.run(
            ["bash", "-c", line], cwd=where, env=env, text=True, capture_output=True
        )

    def _folder_of_script(self) -> Path:
        """Return a folder of the reader's own, with the script of the first page in it."""
        block = re.search(r"^```python\n(.*?)^```", self._index, re.DOTALL | re.M)
        assert block is not None
        begin = "import torch.distributed\ntorch.distributed.init_process_group()\n"
        (self._venv / "script.py").write_text(begin + block[1])  # as the page says
        return self._venv

    def download(self, python: Path) -> dict[str, int]:
        """Return the bytes of every package that an environment had to download, by file."""
        frozen = _checked(python, "-m", "pip", "freeze", "--exclude-editable")
        with tempfile.TemporaryDirectory() as folder:
            wanted = Path(folder) / "wanted.txt"
            wanted.write_text(frozen)
            files = Path(folder) / "files"
            command = [python, "-m", "pip", "download", "--quiet", "--no-deps"]
            _checked(*command, "--dest", files, "--requirement", wanted)
            return {file.name: file.stat().st_size for file in files.iterdir()}


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield one row for each line, and one for what the demo downloads."""
    with tempfile.TemporaryDirectory() as folder:
        newcomer, typed = Newcomer(Path(folder)), set[str]()
        for page in PAGES:
            for line in lines_of(ROOT / page):
                if line in typed:
                    continue
                typed.add(line)
                left_out = NOT_RUN | (NOT_QUICK if options.quick else {})
                if line in left_out:
                    yield Row(f"{page}: {line}", "is not run", {"reason": left_out[line]})
                    continue
                yield _typed(newcomer, page, line)
                if line in ("make demo", "make setup"):
                    yield _downloaded(newcomer, line)


def _typed(newcomer: Newcomer, page: str, line: str) -> Row:
    progress(line)
    begin_s = monotonic()
    done = newcomer.type(line)
    measured: dict[str, object] = {"seconds": monotonic() - begin_s, "code": done.returncode}
    if done.returncode:
        measured["last"] = (done.stdout + done.stderr).strip().splitlines()[-3:]
    return Row(f"{page}: {line}", "ends with 0", measured, done.returncode == 0)


def _downloaded(newcomer: Newcomer, line: str) -> Row:
    progress(f"what {line} downloads")
    sizes = newcomer.download(newcomer.clone / ".venv/bin/python")
    total, largest = sum(sizes.values()), max(sizes, key=sizes.__getitem__)
    found = [name for name in sizes if name.lower().startswith(UNWANTED)]
    measured = {
        "megabytes": total / 1e6,
        "packages": len(sizes),
        "largest": f"{largest} {sizes[largest] / 1e6:.0f} MB",
        "unwanted": found,
    }
    if line != "make demo":
        return Row(f"what `{line}` downloads", "is reported", measured)
    bar = f"at most {MOST_BYTES / 1e9:.0f} GB, without {', '.join(UNWANTED)}"
    return Row("what `make demo` downloads", bar, measured, total <= MOST_BYTES and not found)


def _checked(*command: object) -> str:
    return subprocess.run(
        [str(part) for part in command], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def _base_python() -> Path:
    """Return the Python outside of the environment that this runs in."""
    return Path(sys.base_prefix) / "bin" / "python3"


if __name__ == "__main__":
    main(__doc__ or "", rows)
