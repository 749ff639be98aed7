"""What ``benchmarks.parity`` measures of a pair of loops, on one rank."""

from __future__ import annotations

import gc
import sys
import threading
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks._common import progress
from benchmarks._parity_loops import (
    LOOPS,
    Cell,
    Loop,
    both_loops,
    files_of,
    plain_loop,
    seconds_of_a_product,
    synchronize,
    work_of,
)

NAMES = ("plain", "other")
CLOCKS = ("wall_s", "thread_s", "process_s", "own_threads_s")
NUM_REMEMBERED, NUM_OF_A_PEAK = 20, 4
NUM_WATCHED = NUM_COMPILED = 20  # steps in which nothing is timed
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    """How many steps a cell has.

    Attributes:
        warm: steps before the others: in the first ones a balancer learns.
        pairs: of blocks that are timed.
        block: steps of a block that are timed; one before them belongs to no loop.
        counted: steps whose calls are counted.
    """

    warm: int
    pairs: int
    block: int
    counted: int

    @property
    def num_compared(self) -> int:
        """Steps of which the losses of both loops are compared: those before calls are counted."""
        return self.warm + self.pairs * (self.block + 1)


def join(rank: int, store: str) -> torch.device:
    """Return this rank's device: a card of its own where there are any, connected by NCCL.

    Args:
        rank: of this process.
        store: file in which cards meet, in place of the group that ``run_workers`` made.
    """
    gc.collect()
    gc.freeze()  # what is imported falls into no collection, of one loop or of the other
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device, world_size = torch.device("cuda", rank), dist.get_world_size()
    torch.cuda.set_device(device)
    dist.destroy_process_group()
    keys = dist.FileStore(store, world_size)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=keys, rank=rank, world_size=world_size, device_id=device)
    return device


def measure(rank: int, store: str, todo: Sequence[tuple[Cell, Effort]]) -> list[Found]:
    """Return what this rank finds in each cell, one after the other in the same process."""
    device = join(rank, store)
    product_s = seconds_of_a_product(device)
    found = []
    for number, (cell, effort) in enumerate(todo):
        if rank == 0:
            progress(f"{number + 1} of {len(todo)}: {cell.name}")
        found.append(measured(cell, effort, work_of(cell, product_s, device), device))
        gc.collect()  # process groups are garbage by now: none is to be so in a forked worker
    return found


def measured(cell: Cell, effort: Effort, work: Callable[[], None], device: Any) -> Found:
    """Return what a cell's pair of loops takes: times first, calls after them."""
    num_steps = effort.num_compared + effort.counted + NUM_WATCHED + 1
    with both_loops(cell, work, num_steps, device) as loops:
        times = in_turns(dict(zip(NAMES, loops, strict=True)), effort, device)
        bits = [torch.stack(loop.losses).cpu() for loop in loops]  # of as many steps
        calls = count_calls(loops[1], effort.counted, files_of(cell.rival))
        found = {"times": times, "calls": calls, "losses_equal": torch.equal(*bits)}
        if device.type == "cuda":
            found["waits"] = {
                name: count_waits(loop) for name, loop in zip(NAMES, loops, strict=True)
            }
    return found


def in_turns(loops: dict[str, Loop], effort: Effort, device: Any) -> dict[str, dict[str, Any]]:
    """Return by loop and clock the seconds of every step, ``(pairs, block)``.

    A block of one loop and a block of the other are a pair, and their order changes from pair to
    pair, so that drift falls on both alike. Each block begins with a step that is left out: what
    the other loop's threads still do falls on it.
    """
    times: dict[str, list[Any]] = {name: [] for name in loops}
    for name in NAMES:
        repeat(loops[name], effort.warm)
    threads = own_threads()  # all run by now, and end with the loop
    for pair in range(effort.pairs):
        for name in NAMES[:: -1 if pair % 2 else 1]:
            dist.barrier()
            times[name].append(block_of(loops[name], effort.block, threads, device))
    return {
        name: dict(zip(CLOCKS, np.moveaxis(np.array(blocks), 2, 0), strict=True))
        for name, blocks in times.items()
    }


def block_of(loop: Loop, num_steps: int, threads: Sequence[int], device: Any) -> Any:
    """Return the seconds of each step by each clock, ``(num_steps, len(CLOCKS))``."""
    loop.step()
    synchronize(device)
    stamps = [read_clocks(threads)]
    for number in range(num_steps):
        loop.step()
        if number == num_steps - 1:
            synchronize(device)
        stamps.append(read_clocks(threads))
    return np.diff(np.array(stamps), axis=0)


def read_clocks(threads: Sequence[int]) -> tuple[float, float, float, float]:
    """Return ``CLOCKS`` as they stand, the last one over some threads' clocks."""
    own_s = sum(map(time.clock_gettime, threads))
    return time.perf_counter(), time.thread_time(), time.process_time(), own_s


def own_threads() -> list[int]:
    """Return the CPU clocks of evenstep's threads, all of which have its name."""
    return [
        time.pthread_getcpuclockid(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("evenstep") and thread.ident is not None
    ]


def count_calls(loop: Loop, num_steps: int, files: str) -> Found:
    """Count calls of functions in some files on this thread, which trains, step by step.

    What a generator does next is a call of it, too. Backwards of a card run on another thread and
    are not seen.

    Args:
        loop: warm.
        num_steps: to count.
        files: how the paths of the files begin.

    Returns:
        ``calls`` of each step, and in how many files ``most`` steps are, or ``any`` is, and the
        step with the ``fewest``.
    """
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(files):
            calls[frame.f_code.co_filename] += 1

    counts, num_files, seen = [], [], Counter[str]()
    for _ in range(num_steps):
        sys.setprofile(note)
        loop.step()
        sys.setprofile(None)
        counts.append(calls.total())
        num_files.append(len(calls))
        seen.update(calls.keys())
        calls.clear()
    most = sum(2 * steps > num_steps for steps in seen.values())
    return {"calls": counts, "most": most, "any": len(seen), "fewest": min(num_files)}


def count_waits(loop: Loop) -> float:
    """Return how often a step waits for the card, as ``set_sync_debug_mode`` tells."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            repeat(loop, NUM_WATCHED)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in caught) / NUM_WATCHED


def remember(rank: int, store: str, cells: Sequence[Cell]) -> list[dict[str, Found]]:
    """Return by cell and loop the bytes that it takes at most."""
    device = join(rank, store)
    return [
        {name: bytes_of(cell, kind, device) for name, kind in loops_of(cell).items()}
        for cell in cells
    ]


def loops_of(cell: Cell) -> dict[str, Any]:
    """Return what makes each loop of a cell."""
    return dict(zip(NAMES, (plain_loop, LOOPS[cell.rival]), strict=True))


def bytes_of(cell: Cell, kind: Any, device: Any) -> dict[str, int]:
    """Return the peaks of a loop from before it is made, once everything it needs is loaded.

    ``python`` are those of Python's objects and numpy's arrays, as ``tracemalloc`` counts them, and
    ``own`` what of them the rival's own code has allocated and holds in the end. ``tensors`` are
    what tensors take beside those before some steps: on a card
    ``torch.cuda.max_memory_allocated``, on a CPU the same, from the profiler's record. It is the
    median of five peaks, as threads of the process group free a buffer sooner or later.
    """
    files, work = files_of(cell.rival), work_of(cell, 1.0, device)
    with kind(cell, work, NUM_REMEMBERED + 1, device) as loop:
        repeat(loop, NUM_REMEMBERED)  # what this imports and caches is no part of a loop
    tracemalloc.start()
    with kind(cell, work, 3 * NUM_REMEMBERED, device) as loop:
        repeat(loop, NUM_REMEMBERED)
        _, python = tracemalloc.get_traced_memory()
        traces = tracemalloc.take_snapshot().traces
        tracemalloc.stop()
        own = sum(one.size for one in traces if one.traceback[-1].filename.startswith(files))
        tensors = median(peak_of_tensors(loop, device) for _ in range(5))
    return {"python": python, "own": own, "tensors": tensors}


def repeat(loop: Loop, num_steps: int) -> None:
    """Train some steps."""
    for _ in range(num_steps):
        loop.step()


def peak_of_tensors(loop: Loop, device: Any) -> int:
    """Return by how many bytes tensors take more than before, at most, in a few steps."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        repeat(loop, NUM_OF_A_PEAK)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        repeat(loop, NUM_OF_A_PEAK)
    events: Any = record.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    held = np.cumsum([num_bytes for _, num_bytes in changes])
    return int(max(held, default=0))


def count_graphs(rank: int, store: str, cell: Cell) -> dict[str, Found]:
    """Return by loop how many graphs torch compiles, how often it breaks them, and the losses."""
    device = join(rank, store)
    return {name: graphs_of(cell, kind, device) for name, kind in loops_of(cell).items()}


def graphs_of(cell: Cell, kind: Any, device: Any) -> Found:
    """Return what a loop compiles, as if nothing had been compiled before."""
    counters: Any = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    with kind(cell, work_of(cell, 1.0, device), NUM_COMPILED + 1, device) as loop:
        repeat(loop, NUM_COMPILED)
        return {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": sum(counters["graph_break"].values()),
            "losses": [one.hex() for one in torch.stack(loop.losses).tolist()],
        }
