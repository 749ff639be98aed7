"""``evenstep plan``: what workers are worth, from their speeds or from a recorded run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import AffineTime
from .._doctor import Checkup, host_mbit, read_checkup, run_times
from .._render import printable, terminal_width
from ..advice import advise, read_run
from ..advice._advice import Advice, RunTimes
from ..sim._scenarios import DRAWN
from ._common import check_ends, counts, fail, least, numbers, refused, spread, unread
from ._plan_parts import Part, as_json, as_text, lengths_part, links_part, memory_part

Speeds = Annotated[
    str | None, typer.Option(help="Samples per second of each worker, such as 100,80,20.")
]
Run = Annotated[
    Path | None,
    typer.Option(help="In place of speeds: a recorded run's folder, or its events.jsonl."),
]
Doctor = Annotated[
    Path | None, typer.Option(help="In place of speeds: the file of `evenstep doctor --out FILE`.")
]
Samples = Annotated[
    int | None, typer.Option(help="Samples per step (default: that of the run, if there is one).")
]
Intercepts = Annotated[
    str | None,
    typer.Option(help="Fixed seconds of a step, one number or one per worker (default: 0)."),
]
Overhead = Annotated[
    float | None,
    typer.Option(help="Seconds of a step for communication and optimizer (default: 0)."),
]
MostSamples = Annotated[
    str | None,
    typer.Option(
        "--max", help="Most samples that fit, one number or one per worker (default: no cap)."
    ),
]
Added = Annotated[
    str | None,
    typer.Option(help="Speeds of machines to try adding (default: the fastest and the slowest)."),
]
Mbit = Annotated[
    str | None,
    typer.Option(help="Mbit/s of each worker's link, one number or one per worker."),
]
ModelMb = Annotated[
    float | None, typer.Option(help="MB of gradients that a step sums; with --mbit.")
]
Chunks = Annotated[
    int, typer.Option(help="Number of chunks that gradients are sent in; with --mbit.")
]
Overlap = Annotated[
    float, typer.Option(help="Part of computing in which gradients are sent; with --mbit.")
]
Lengths = Annotated[
    str | None,
    typer.Option(help=f"Lengths of samples: {', '.join(DRAWN)}, or a file with one per line."),
]
Padded = Annotated[
    bool, typer.Option("--padded", help="Samples are padded to the longest; with --lengths.")
]
HiddenSize = Annotated[
    int | None,
    typer.Option(help="A sample costs L + L**2 / (6 N); N = 0: L (default: 4096; with --lengths)."),
]
Parameters = Annotated[
    float | None, typer.Option(help="Number of parameters, such as 1.3e9; with --memory.")
]
Memory = Annotated[
    str | None,
    typer.Option(help="GiB of each worker's memory, such as 24,24,12; with --parameters."),
]
Optimizer = Annotated[str, typer.Option(help="adam, momentum or sgd; with --parameters.")]
Dtype = Annotated[
    str, typer.Option(help="float32 (also under autocast) or bfloat16; with --parameters.")
]
Layers = Annotated[
    int, typer.Option(help="Number of layers that FSDP2 gathers one by one; with --parameters.")
]
SampleMb = Annotated[
    float | None, typer.Option(help="MiB that a sample takes in a forward; with --parameters.")
]


def plan(
    speeds: Speeds = None,
    run: Run = None,
    doctor: Doctor = None,
    global_batch_size: Samples = None,
    intercepts: Intercepts = None,
    overhead: Overhead = None,
    max_batch: MostSamples = None,
    add: Added = None,
    mbit: Mbit = None,
    model_mb: ModelMb = None,
    chunks: Chunks = 8,
    overlap: Overlap = 0.0,
    lengths: Lengths = None,
    padded: Padded = False,
    hidden_size: HiddenSize = None,
    parameters: Parameters = None,
    memory: Memory = None,
    optimizer: Optimizer = "adam",
    dtype: Dtype = "float32",
    layers: Layers = 32,
    sample_mb: SampleMb = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say how long a step takes, equal and balanced, and what each worker or one more brings."""
    width = terminal_width()
    held: dict[str, Any] = {"parameters": parameters, "memory": memory, "optimizer": optimizer}
    held |= {"dtype": dtype, "layers": layers, "sample_mb": sample_mb}
    try:
        rest = (global_batch_size, intercepts, overhead, max_batch, add, mbit, model_mb, lengths)
        if {speeds, run, doctor, *rest} == {None} and {parameters, memory} != {None}:
            return _write({"memory": memory_part(None, width, **held)}, as_json_)
        checkup = None if doctor is None else _checkup(doctor)
        found = _workers(speeds, run, checkup, intercepts)
        asked = _asked(found, global_batch_size, overhead, max_batch)
        advice, more = _advised(asked, add)
        parts = {
            "": (as_json(asked, advice, more), as_text(asked, advice, more, width)),
            "links": links_part(
                asked,
                advice.balanced.batch_size,
                width,
                mbit=_mbit(mbit, model_mb, checkup, asked.ranks),
                model_mb=model_mb,
                chunks=chunks,
                overlap=overlap,
                overhead_s=overhead or 0.0,  # what a run took past computing was its exchange
            ),
            "lengths": lengths_part(asked, width, lengths, padded=padded, hidden_size=hidden_size),
            "memory": memory_part(asked.times.world_size, width, **held),
        }
    except (ValueError, ImportError) as error:
        fail(str(error), 2)
    _write(parts, as_json_)


def _write(parts: dict[str, Part | None], in_json: bool) -> None:
    """Print each part under its name as JSON, the one without a name at the top, or for people."""
    there = {name: part for name, part in parts.items() if part is not None}
    if not in_json:
        typer.echo("\n\n".join(text for _, text in there.values()))
        return
    values = {name: plain for name, (plain, _) in there.items()}
    typer.echo(json.dumps(values.pop("", {}) | values, indent=2))


def _workers(
    speeds: str | None, run: Path | None, checkup: Checkup | None, intercepts: str | None
) -> RunTimes:
    """Return what a run or a checkup shows, or what was typed, which is of no step."""
    options = {"--speeds": speeds, "--run": run, "--doctor": checkup}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "neither"
        remedy = (
            "Write `--speeds 100,80,20 --global-batch-size 256`, `--run DIR` or `--doctor FILE`."
        )
        raise refused("plan", ", ".join(options), "be given, one of them", got, remedy)
    if speeds is not None:
        return _typed(speeds, intercepts)
    if intercepts is not None:
        remedy = "They are estimated; leave it out."
        raise refused("plan", "--intercepts", f"be left out with {given[0]}", intercepts, remedy)
    if checkup is not None:
        return run_times(checkup)
    assert run is not None
    try:
        return read_run(run)
    except OSError as error:
        raise unread("plan", "--run", run, error) from error
    except ValueError as error:
        raise ValueError(f"`evenstep plan --run`: {error}") from error


def _typed(speeds: str, intercepts: str | None) -> RunTimes:
    found = numbers("plan", "--speeds", speeds)
    fixed: tuple[float, ...] = (0.0,)
    if intercepts is not None:
        fixed = numbers("plan", "--intercepts", intercepts, positive=False)
    fixed = spread("plan", "--intercepts", fixed, len(found))
    exactly = np.zeros(len(found))
    return RunTimes(
        times=AffineTime(np.array(fixed), 1 / np.array(found)),
        speed_error=exactly,
        time_error=exactly,
        is_line_known=exactly == 0,
        num_steps=0,
        step_s=0.0,
        global_batch_size=0,
        ranks=tuple(range(len(found))),
    )


def _checkup(path: Path) -> Checkup:
    """Return what `evenstep doctor` wrote."""
    remedy = "Write it by `evenstep doctor --out FILE`."
    check_ends("plan", "--doctor", path, remedy)
    try:
        return read_checkup(path)
    except OSError as error:
        raise unread("plan", "--doctor", path, error, remedy) from error
    except ValueError as error:
        raise ValueError(f"`evenstep plan --doctor`: {error}") from error


def _mbit(
    typed: str | None, model_mb: float | None, checkup: Checkup | None, ranks: Sequence[int]
) -> str | None:
    """Return the links as they were typed, else, where they are needed, as a checkup has them."""
    if typed is not None or model_mb is None or checkup is None:
        return typed
    by_machine = host_mbit(checkup)
    machines = [checkup.of(rank).machine for rank in ranks]
    host = {name: printable(checkup.machines[name][0].host) for name in machines}
    if unknown := [host[name] for name in host if name not in by_machine]:
        rule = "be given where no link of a host to another was measured"
        remedy = "Write `--mbit 200,200,50` say."
        raise refused("plan", "--mbit", rule, f"none for {', '.join(unknown)}", remedy)
    name, most = Counter(machines).most_common(1)[0]
    if most > 1:
        got = f"{most} workers on {host[name]}, which share its link"
        remedy = "Write what each of them has of it: `--mbit 50,50,200` say."
        raise refused("plan", "--mbit", "be given unless each host has one worker", got, remedy)
    return ",".join(f"{by_machine[name]:.6g}" for name in machines)


def _asked(
    run: RunTimes, global_batch_size: int | None, overhead: float | None, max_batch: str | None
) -> RunTimes:
    """Return the workers with what was typed in the place of what is known, all checked."""
    size = run.times.world_size
    total = run.global_batch_size if global_batch_size is None else global_batch_size
    if global_batch_size is None and not run.num_steps:
        remedy = "Write `--global-batch-size 256` say."
        raise refused("plan", "--global-batch-size", "be given with --speeds", "nothing", remedy)
    remedy = "Every worker computes a sample at least."
    least("plan", "--global-batch-size", total, size, remedy)
    overhead_s = run.overhead_s if overhead is None else overhead
    if not (np.isfinite(overhead_s) and overhead_s >= 0):
        remedy = "0 counts computing alone."
        raise refused("plan", "--overhead", "be seconds, at least 0", overhead_s, remedy)
    caps = run.max_batch_size
    if max_batch is not None:
        given = counts("plan", "--max", max_batch)
        caps = np.array(spread("plan", "--max", given, size))
    if caps is not None and caps.sum() < total:
        rule = f"be at most {caps.sum()}, what the caps (`--max`) hold together"
        remedy = "Lower it, or raise `--max`."
        raise refused("plan", "--global-batch-size", rule, total, remedy)
    return replace(run, global_batch_size=total, overhead_s=overhead_s, max_batch_size=caps)


def _advised(run: RunTimes, add: str | None) -> tuple[Advice, AffineTime]:
    """Return what workers are worth, and the machines that might be added.

    Of typed speeds: their fixed costs are the median of the others', and nothing caps them.
    """
    times, caps = run.times, run.max_batch_size
    if add is not None:
        slope_s = 1 / np.array(numbers("plan", "--add", add))
        more = AffineTime(np.full(len(slope_s), np.median(times.intercept_s)), slope_s)
        more_caps = None
    else:
        order = np.argsort(times.slope_s, kind="stable")
        ends = order[[0, -1]] if times.slope_s[order[0]] < times.slope_s[order[-1]] else order[:1]
        more = AffineTime(times.intercept_s[ends], times.slope_s[ends])
        more_caps = None if caps is None else caps[ends]
    advice = advise(
        times,
        run.global_batch_size,
        max_batch_size=caps,
        more=more,
        more_max_batch_size=more_caps,
        overhead_s=run.overhead_s,
    )
    return advice, more
