"""Whether `evenstep top` keeps its pace on a long run while it is written, in constant memory.

The file is that of a simulated run of 100,000 steps on 64 ranks. A second process appends steps to
it, in the pace of training and then as fast as it can. The view is drawn for a terminal of 120 x 40
as often as it will, ten times a second. At last the whole file comes through a pipe.
"""

import argparse
import io
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep

import numpy as np
from rich.console import Console

from benchmarks._common import Row, main, progress
from benchmarks._report_run import events, write_run
from evenstep._telemetry import JsonLines
from evenstep._top import FileSource, Source, StreamSource, watch
from evenstep.events import RunEnded, RunStarted, StepMeasured

WORLD_SIZE = 64
REFRESH_S = 0.1
LIMIT_S = 0.1
MOST_GROWTH = 8 << 20  # bytes: what an allocator keeps for itself varies by as much


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield how long the first view takes, each refresh, and what memory grows to."""
    num_steps, lasted_s = (1000, 5.0) if options.quick else (100_000, 60.0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "events.jsonl"
        progress(f"writing {num_steps} steps of {WORLD_SIZE} ranks to {path}")
        _write(path, num_steps)
        size = {"file_mb": path.stat().st_size / 1e6}
        yield _opened(path, size)
        for what, per_s in (("20 steps a second", 20.0), ("as fast as it can", None)):
            with _writer(path, num_steps, per_s):
                yield _followed(path, what, lasted_s)
        yield _streamed(path)


def _write(path: Path, num_steps: int) -> None:
    write_run(path, num_steps=num_steps, world_size=WORLD_SIZE)
    with path.open("rb+") as file:  # without its end: the run goes on
        file.seek(-200, os.SEEK_END)
        file.seek(file.read().rindex(b'{"event": "RunEnded"') - 200, os.SEEK_END)
        file.truncate()


def _opened(path: Path, size: dict[str, float]) -> Row:
    began_s = perf_counter()
    frames = _Frames(FileSource(path))
    frames.watch(num=1)
    measured = {"first_view_s": perf_counter() - began_s, "known": frames.source.remark, **size}
    return Row("the first view", "<= 1 s", measured, measured["first_view_s"] <= 1)


def _followed(path: Path, what: str, lasted_s: float) -> Row:
    frames = _Frames(FileSource(path))
    frames.watch(lasted_s=lasted_s / 4)  # until it has caught up and holds what it will hold
    before = frames.source.run.num_measured
    memory, frames.took_s, frames.cpu_s = [_memory()], [], 0.0
    for _ in range(3):
        frames.watch(lasted_s=lasted_s / 4)
        memory.append(_memory())
    took_ms = 1e3 * np.array(frames.took_s)
    measured = {
        "median_ms": float(np.median(took_ms)),
        "p99_ms": float(np.quantile(took_ms, 0.99)),
        "max_ms": float(took_ms.max()),
        "cpu_ms": 1e3 * frames.cpu_s / len(took_ms),
        "refreshes": len(took_ms),
        "steps_read": frames.source.run.num_measured - before,
        "memory_mb": [round(each / 1e6, 1) for each in memory],
    }
    met = measured["p99_ms"] <= 1e3 * LIMIT_S and memory[-1] - memory[0] <= MOST_GROWTH
    bar = f"refresh (p99) <= {1e3 * LIMIT_S:.0f} ms, memory constant"
    return Row(f"while another process writes, {what}", bar, measured, met)


def _streamed(path: Path) -> Row:
    """Return what the whole file takes as a stream, with a view once a second."""
    began_s, memory = process_time(), []
    with path.open("rb") as file:
        source = StreamSource(file)
        while not source.is_over:
            source.update(within_s=1.0)
            memory.append(_memory())
    half = memory[len(memory) // 2 :]
    measured = {
        "cpu_s": process_time() - began_s,
        "mb_per_cpu_s": path.stat().st_size / 1e6 / (process_time() - began_s),
        "memory_mb": [round(each / 1e6, 1) for each in (memory[0], half[0], half[-1])],
    }
    met = half[-1] - half[0] <= MOST_GROWTH
    return Row("the whole file through a pipe", "memory constant", measured, met)


class _Frames:
    """Draws a source, and notes how long each refresh takes: reading, figures and text."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.took_s: list[float] = []
        self.cpu_s = 0.0

    def watch(self, *, num: int = 1 << 30, lasted_s: float = 1e9) -> None:
        """Draw so many times, or for so long."""
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, width=120, height=40)
        until_s = perf_counter() + lasted_s
        began_s, left, cpu_s = perf_counter(), num, process_time()

        def wait(seconds: float) -> bool:
            nonlocal began_s, left
            self.took_s.append(perf_counter() - began_s)
            assert "rank" in stream.getvalue()
            stream.seek(0)
            stream.truncate()
            sleep(seconds)
            began_s, left = perf_counter(), left - 1
            return left <= 0 or began_s > until_s

        watch(self.source, console, title="runs/long", refresh_s=REFRESH_S, wait=wait)
        self.cpu_s += process_time() - cpu_s


@contextmanager
def _writer(path: Path, first_step: int, per_s: float | None) -> Iterator[None]:
    process = multiprocessing.get_context("spawn").Process(
        target=_write_on, args=(path, first_step, per_s), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _write_on(path: Path, first_step: int, per_s: float | None) -> None:
    """Go on with the run as training would, until the process is ended."""
    sink, next_s = JsonLines(path), monotonic()
    for event in events(1_000_000, WORLD_SIZE, seed=1):
        if isinstance(event, RunStarted | RunEnded):
            continue
        sink(replace(event, step=event.step + first_step))
        if isinstance(event, StepMeasured) and per_s is not None:
            next_s += 1 / per_s
            sleep(max(0.0, next_s - monotonic()))


def _memory() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="where to write the run, 1 GB; a temporary one")


if __name__ == "__main__":
    main(__doc__, rows, _options)
