"""``evenstep plan``: what workers are worth, from their speeds or from a recorded run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import AffineTime
from .._doctor import Checkup, host_mbit, read_checkup, run_times
from .._render import printable, terminal_width
from .._types import IntArray
from ..advice import advise, read_run
from ..advice._advice import Advice
from ..advice._recorded_run import RunTimes
from ._common import check_ends, counts, fail, least, numbers, refused, spread, unread
from ._plan_parts import (
    Chunks,
    Dtype,
    HiddenSize,
    Layers,
    Lengths,
    Mbit,
    Memory,
    MemoryAnswer,
    MemoryQuestion,
    ModelMb,
    Optimizer,
    Overlap,
    Padded,
    Parameters,
    SampleMb,
    answer_lengths,
    answer_links,
    answer_memory,
    links_json,
    links_text,
    memory_json,
    memory_text,
    splits_as_text,
)
from ._plan_text import Question, as_json, as_text

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

Part = tuple[dict[str, Any], str]  # as JSON, and for people


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
    held = MemoryQuestion(parameters, memory, optimizer, dtype, layers, sample_mb)
    try:
        rest = (global_batch_size, intercepts, overhead, max_batch, add, mbit, model_mb, lengths)
        if held.is_asked and {speeds, run, doctor, *rest} == {None}:
            return _write(_memory_part(answer_memory(held, None), width), as_json_)
        checkup = None if doctor is None else _checkup(doctor)
        recorded = _recorded(speeds, run, checkup, intercepts)
        question = _question(
            recorded,
            speeds=speeds,
            intercepts=intercepts,
            global_batch_size=global_batch_size,
            overhead=overhead,
            max_batch=max_batch,
        )
        advice, times = _advised(question, add)
        links = answer_links(
            question,
            advice.balanced.batch_size,
            mbit=_mbit(mbit, model_mb, checkup, question.ranks),
            model_mb=model_mb,
            chunks=chunks,
            overlap=overlap,
            overhead_s=overhead or 0.0,  # what a run took past computing was its exchange
        )
        by_length = answer_lengths(question, lengths, padded=padded, hidden_size=hidden_size)
        fits = answer_memory(held, question.times.world_size)
    except (ValueError, ImportError) as error:
        fail(str(error), 2)
    parts = {"": (as_json(question, advice, times), as_text(question, advice, times, width))}
    parts |= {"links": (links_json(links), links_text(links, width))} if links else {}
    parts |= {"lengths": (asdict(by_length), splits_as_text(by_length, width))} if by_length else {}
    _write(parts | _memory_part(fits, width), as_json_)


def _memory_part(fits: MemoryAnswer | None, width: int | None) -> dict[str, Part]:
    return {"memory": (memory_json(fits), memory_text(fits, width))} if fits else {}


def _write(parts: dict[str, Part], in_json: bool) -> None:
    """Print each part under its name as JSON, the one without a name at the top, or for people."""
    if not in_json:
        typer.echo("\n\n".join(text for _, text in parts.values()))
        return
    found = {name: plain for name, (plain, _) in parts.items() if name}
    typer.echo(json.dumps((parts[""][0] if "" in parts else {}) | found, indent=2))


def _recorded(
    speeds: str | None, run: Path | None, checkup: Checkup | None, intercepts: str | None
) -> RunTimes | None:
    """Return what a run or a checkup shows, if that is what was asked for."""
    options = {"--speeds": speeds, "--run": run, "--doctor": checkup}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "neither"
        remedy = (
            "Write `--speeds 100,80,20 --global-batch-size 256`, `--run DIR` or `--doctor FILE`."
        )
        raise refused("plan", ", ".join(options), "be given, one of them", got, remedy)
    if speeds is not None:
        return None
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


def _checkup(path: Path) -> Checkup:
    """Return what `evenstep doctor` wrote."""
    remedy = "Write it by `evenstep doctor --out FILE`."
    check_ends("plan", "--doctor", path, remedy)
    try:
        return read_checkup(path)
    except OSError as error:
        got = f"{path} ({error.strerror or error})"
        raise refused("plan", "--doctor", "name a file that can be read", got, remedy) from error
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


def _question(
    recorded: RunTimes | None,
    *,
    speeds: str | None,
    intercepts: str | None,
    global_batch_size: int | None,
    overhead: float | None,
    max_batch: str | None,
) -> Question:
    """Return the workers and what is asked of them, all checked."""
    if recorded is None:
        assert speeds is not None
        times = _typed(speeds, intercepts)
    else:
        times = recorded.times
    total = global_batch_size
    if total is None:
        if recorded is None:
            remedy = "Write `--global-batch-size 256` say."
            rule = "be given with --speeds"
            raise refused("plan", "--global-batch-size", rule, "nothing", remedy)
        total = recorded.global_batch_size
    remedy = "Every worker computes a sample at least."
    least("plan", "--global-batch-size", total, times.world_size, remedy)
    overhead_s = recorded.overhead_s if recorded and overhead is None else overhead or 0.0
    if not (np.isfinite(overhead_s) and overhead_s >= 0):
        remedy = "0 counts computing alone."
        raise refused("plan", "--overhead", "be seconds, at least 0", overhead_s, remedy)
    caps = None if recorded is None else recorded.max_batch_size
    if max_batch is not None:
        given = counts("plan", "--max", max_batch)
        caps = np.array(spread("plan", "--max", given, times.world_size, like="the plan"))
    if caps is not None and caps.sum() < total:
        rule = f"be at most {caps.sum()}, what the caps (`--max`) hold together"
        remedy = "Lower it, or raise `--max`."
        raise refused("plan", "--global-batch-size", rule, total, remedy)
    return Question(times, total, caps, overhead_s, recorded)


def _typed(speeds: str, intercepts: str | None) -> AffineTime:
    found = numbers("plan", "--speeds", speeds)
    fixed: tuple[float, ...] = (0.0,)
    if intercepts is not None:
        fixed = numbers("plan", "--intercepts", intercepts, positive=False)
    fixed = spread("plan", "--intercepts", fixed, len(found), like="--speeds")
    return AffineTime(np.array(fixed), 1 / np.array(found))


def _advised(question: Question, add: str | None) -> tuple[Advice, AffineTime]:
    """Return what workers are worth, and the machines that might be added."""
    times, caps = _newcomers(question, add)
    advice = advise(
        question.times,
        question.global_batch_size,
        max_batch_size=question.max_batch_size,
        more=times,
        more_max_batch_size=caps,
        overhead_s=question.overhead_s,
    )
    return advice, times


def _newcomers(question: Question, add: str | None) -> tuple[AffineTime, IntArray | None]:
    """Return the machines that might be added, and what fits on them.

    Of typed speeds: their fixed costs are the median of the others', and nothing caps them.
    """
    times, caps = question.times, question.max_batch_size
    if add is not None:
        slope_s = 1 / np.array(numbers("plan", "--add", add))
        usual_s = float(np.median(times.intercept_s))
        return AffineTime(np.full(len(slope_s), usual_s), slope_s), None
    order = np.argsort(times.slope_s, kind="stable")
    ends = order[[0, -1]] if times.slope_s[order[0]] < times.slope_s[order[-1]] else order[:1]
    like = AffineTime(times.intercept_s[ends], times.slope_s[ends])
    return like, None if caps is None else caps[ends]
