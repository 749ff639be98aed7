"""The answer of ``evenstep plan``, part by part: speeds, links, lengths of samples, and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from .. import AffineTime, sim
from .._render import counted, number, paragraph, percent, printable, seconds, text_table
from .._types import Cluster
from ..advice._advice import Advice, PlannedSplit, RunTimes
from ..network import Aggregation, Links, optimal_shares
from ..network._plans._optimum import equal_shares
from ..network.sim import step_over_links_s
from ..sim import Scenario
from ..sim._sample_workload import SampleWorkload
from ..sim._scenarios import DRAWN, read_lengths
from ._common import check_ends, least, numbers, refused, spread, within

ROUGH = 0.1
"""A speed with a larger standard error gets a word."""

LITTLE = 0.01
"""A worker whose loss costs less than this is said to bring little."""


def as_text(run: RunTimes, advice: Advice, more: AffineTime, width: int | None = None) -> str:
    """Return the answer in words and tables, for a terminal of ``width`` columns or of any."""
    parts = [
        paragraph(_head(run), width),
        _splits(run, advice, width),
        _workers(run, advice, width),
        _added(advice, more, width),
        *(paragraph(note, width) for note in _notes(run, advice)),
    ]
    return "\n\n".join(parts)


def as_json(run: RunTimes, advice: Advice, more: AffineTime) -> dict[str, Any]:
    """Return the answer as plain values, times in seconds and shares as fractions of 1."""
    times, caps = run.times, run.max_batch_size
    workers = [
        {
            "rank": run.ranks[at],
            "name": _name(run, at),
            "samples_per_s": _finite(_speed(times, at)),
            "samples_per_s_error": _error(run, at),
            "intercept_s": float(times.intercept_s[at]),
            "max_batch_size": None if caps is None else int(caps[at]),
            "equal_batch_size": advice.equal.batch_size[at],
            "batch_size": advice.balanced.batch_size[at],
            "step_without_s": None if without is None else without.step_s,
            "brings": advice.brings(at),
            "worth_keeping": advice.worth_keeping[at],
        }
        for at, without in enumerate(advice.without)
    ]
    added = [
        {
            "samples_per_s": _finite(_speed(more, index)),
            "intercept_s": float(more.intercept_s[index]),
            "batch_size": split.batch_size[-1],
            "step_s": split.step_s,
            "step_shorter_by": advice.adds(index),
        }
        for index, split in enumerate(advice.more)
    ]
    return {
        "global_batch_size": run.global_batch_size,
        "overhead_s": run.overhead_s,
        "equal": _split(advice.equal),
        "balanced": _split(advice.balanced),
        "best": _split(advice.best),
        "workers": workers,
        "add": added,
    }


def _split(split: PlannedSplit) -> dict[str, Any]:
    return {
        "batch_size": list(split.batch_size),
        "step_s": split.step_s,
        "samples_per_s": split.samples_per_s,
    }


def _head(run: RunTimes) -> str:
    workers = counted(run.times.world_size, "worker")
    text = f"{workers}, {run.global_batch_size} samples a step"
    if run.num_steps:
        text += f"; speeds from {run.num_steps} recorded steps, slowest worker "
        text += f"{seconds(run.step_s)} in the median"
    if run.overhead_s:
        text += f"; {seconds(run.overhead_s)} of every step are not computing"
    return text


def _splits(run: RunTimes, advice: Advice, width: int | None) -> str:
    named = [("equal split", advice.equal), ("balanced", advice.balanced)]
    if out := _left_out(run, advice):
        named.append((f"without {out}", advice.best))
    rows = []
    for name, split in named:
        gain = f"{advice.equal.step_s / split.step_s:.2f}"
        rows.append([name, seconds(split.step_s), number(split.samples_per_s), gain])
    return text_table(["", "step", "samples/s", "times as fast"], rows, width=width)


def _workers(run: RunTimes, advice: Advice, width: int | None) -> str:
    header = ["worker", "samples/s", "fixed cost", "equal", "balanced", "step without it", ""]
    rows = []
    for at, without in enumerate(advice.without):
        cost = seconds(float(run.times.intercept_s[at]))
        sizes = [str(split.batch_size[at]) for split in (advice.equal, advice.balanced)]
        speed = number(_speed(run.times, at))
        if (error := _error(run, at)) is not None:
            speed += f" ± {_rounded(error)} %"
        rows.append([_name(run, at), speed, cost, *sizes, *_verdict(advice, at, without)])
    return text_table(header, rows, width=width)


def _verdict(advice: Advice, at: int, without: PlannedSplit | None) -> tuple[str, str]:
    """Return the step without a worker, and what that says of it."""
    brings = advice.brings(at)
    if without is None or brings is None:
        return "does not fit", "needed"
    text = f"{seconds(without.step_s)} ({'+' if brings >= 0 else ''}{percent(brings)} %)"
    if not advice.worth_keeping[at]:
        return text, "leave out"
    return text, "brings little" if brings < LITTLE else "keep"


def _added(advice: Advice, more: AffineTime, width: int | None) -> str:
    rows = [
        [
            f"{number(_speed(more, index))} samples/s, {seconds(float(more.intercept_s[index]))} "
            "fixed",
            str(split.batch_size[-1]),
            seconds(split.step_s),
            f"{percent(advice.adds(index))} %",
        ]
        for index, split in enumerate(advice.more)
    ]
    return text_table(["one more machine", "balanced", "step", "shorter by"], rows, width=width)


def _notes(run: RunTimes, advice: Advice) -> Iterator[str]:
    if out := _left_out(run, advice):
        yield (
            f"Fastest without worker {out}: one sample there takes as long as the whole global "
            "batch on the others."
        )
    if missing := run.untimed:
        text = "Rank {} has no times and is left out."
        if len(missing) > 1:
            text = "Ranks {} have no times and are left out."
        yield text.format(", ".join(map(str, missing)))
    if run.saved_by_cost is not None:
        saved = [percent(share) for share in run.saved_by_cost]
        yield (
            "The run assigned samples by cost. Of computing with equal counts, speeds alone would "
            f"have saved {saved[0]} %, lengths alone {saved[1]} %; both saved {saved[2]} %. Batch "
            "sizes tell little of its times: the fixed costs and speeds above are rough."
        )
    is_rough = (run.speed_error > ROUGH) & run.is_line_known
    if is_rough.any():
        yield (
            f"The batch sizes of worker {_called(run, is_rough)} were too similar for this "
            "much noise: fixed cost and samples/s are uncertain, and workers that differ by less "
            "than their errors may be equal. Steps near the sizes of the run are known to "
            f"{_rounded(float(run.time_error[is_rough].max()))} %."
        )
    if not run.is_line_known.all():
        yield (
            f"Worker {_called(run, ~run.is_line_known)} had one batch size only, so its "
            "fixed cost is unknown and assumed to be 0. Record a run with a policy that balances "
            "to measure it."
        )


def _left_out(run: RunTimes, advice: Advice) -> str:
    """Return the workers that are not worth keeping, nothing if all are."""
    return _called(run, [not keep for keep in advice.worth_keeping])


def _called(run: RunTimes, chosen: Iterable[bool]) -> str:
    """Return the numbers of the chosen workers."""
    return ", ".join(str(rank) for rank in compress(run.ranks, chosen))


def _name(run: RunTimes, at: int) -> str:
    rank = run.ranks[at]
    return printable(f"{rank} {run.names[at]}") if run.names else str(rank)


def _speed(times: AffineTime, at: int) -> float:
    """Return samples per second past the fixed cost; infinite where samples cost nothing."""
    slope_s = float(times.slope_s[at])
    return 1 / slope_s if slope_s else math.inf


def _error(run: RunTimes, at: int) -> float | None:
    """Return the relative standard error of a recorded speed; None of one that was typed."""
    return float(run.speed_error[at]) if run.num_steps else None


def _rounded(share: float) -> str:
    """Return a share in whole percent, and no more than all of it."""
    return f"{max(1, round(100 * min(share, 1.0)))}"


def _finite(value: float) -> float | None:
    """Return what JSON has a word for."""
    return value if math.isfinite(value) else None


MBIT = 125_000
_MOST_CHUNKS = 10_000  # they are exchanged one by one


Part = tuple[dict[str, Any], str]
"""Of the answer, as plain values and in words and tables, for a terminal."""


def links_part(
    run: RunTimes,
    batch_size: tuple[int, ...],
    width: int | None,
    *,
    mbit: str | None,
    model_mb: float | None,
    chunks: int,
    overlap: float,
    overhead_s: float,
) -> Part | None:
    """Return what links change; None if they were not given.

    Times are seconds of a step with balanced batch sizes and the exchange of gradients: by plain
    all-reduce, by equal shares, and by the best ones.
    """
    if (mbit is None) != (model_mb is None):
        got = f"{'--mbit' if mbit else '--model-mb'} alone"
        remedy = "Write `--mbit 200,200,50 --model-mb 100` say."
        raise refused("plan", "--mbit, --model-mb", "be given together", got, remedy)
    if mbit is None or model_mb is None:
        return None
    _check_links(model_mb, chunks, overlap)
    size = run.times.world_size
    given = spread("plan", "--mbit", numbers("plan", "--mbit", mbit), size)
    links = Links(np.array(given) * MBIT)
    aggregation = Aggregation(size, round(model_mb * 250_000) * 4, num_chunks=chunks)
    best_shares = optimal_shares(aggregation, links)
    compute_s = run.times.seconds(np.array(batch_size, np.int64))
    steps_s = [
        step_over_links_s(compute_s, aggregation, links, shares=each, overlap=overlap) + overhead_s
        for each in (None, equal_shares(aggregation), best_shares)
    ]
    shares = best_shares.tolist()
    values = {
        "mbit": list(given),
        "num_bytes": aggregation.num_bytes,
        "num_chunks": chunks,
        "overlap": overlap,
        **dict(zip(("plain_s", "equal_s", "best_s"), steps_s, strict=True)),
        "best_shares": shares,
    }
    ways = ("balanced, plain all-reduce", "balanced, equal shares", "balanced, best shares")
    rows = _compared(ways, steps_s)
    workers = [
        [str(rank), number(rate), f"{100 * share:.0f} %"]
        for rank, rate, share in zip(run.ranks, given, shares, strict=True)
    ]
    names = [f"with {number(aggregation.num_bytes / 1e6)} MB of gradients", "step", "times as fast"]
    saved = 1 - steps_s[2] / steps_s[0]
    verdict = f"The best shares make a step {percent(saved)} % shorter than plain all-reduce does."
    if saved < 0.01:
        verdict = "No shares are faster than plain all-reduce on these links."
    steps = text_table(names, rows, width=width)
    each = text_table(["worker", "Mbit/s", "best share"], workers, width=width)
    return values, "\n\n".join([steps, each, paragraph(verdict, width)])


def _check_links(model_mb: float, chunks: int, overlap: float) -> None:
    remedy = "4 bytes a parameter: 100 for 25 million."
    within("plan", "--model-mb", model_mb, 0.001, 1e16, remedy)
    remedy = "1 is a barrier between push and pull; past 64 hardly anything changes."
    within("plan", "--chunks", chunks, 1, _MOST_CHUNKS, remedy)
    if not 0 <= overlap <= 1:
        remedy = "0 exchanges at the end, 0.67 during the backward."
        raise refused("plan", "--overlap", "be in [0, 1]", overlap, remedy)


def _compared(ways: Sequence[str], steps_s: Sequence[float]) -> list[list[str]]:
    """Return a row for each way: how long a step takes, and how often it fits into the first."""
    return [
        [way, seconds(step_s), f"{steps_s[0] / step_s:.2f}"]
        for way, step_s in zip(ways, steps_s, strict=True)
    ]


_MOST_DRAWN = 10**8  # samples of all steps: a gigabyte
_LEARNING, _COUNTED = 40, 60  # steps until costs are learnt, and those that `plan` shows
_SPLITS = ("equal counts", "by speed alone", "by length alone", "by both", "lower bound")
_SPLIT_KEYS = ("equal_s", "speed_s", "length_s", "both_s", "bound_s")


def _workload(
    scenario: Scenario, lengths: str, global_batch_size: int, *, padded: bool, hidden_size: int
) -> SampleWorkload:
    """Return a scenario's workers with lengths that are drawn, or read from a file.

    Raises:
        ValueError: there is no such file, or its lengths cannot be; the message names the option.
    """
    most, remedy = _MOST_DRAWN // scenario.num_steps, "Each sample of each step is drawn."
    within("plan", "--global-batch-size", global_batch_size, 1, most, remedy)
    within("plan", "--hidden-size", hidden_size, 0, 10**9, "4096 is usual, 0 is L alone.")
    if lengths not in DRAWN:
        check_ends("plan", "--lengths", Path(lengths), "Write one length in each line.")
    try:
        return scenario.with_lengths(
            lengths if lengths in DRAWN else read_lengths(lengths),
            global_batch_size,
            padded=padded,
            hidden_size=hidden_size,
        )
    except OSError as error:
        rule, remedy = f"be {', '.join(DRAWN)} or a file", "Write one length in each line."
        got = f"{lengths} ({error.strerror or error})"
        raise refused("plan", "--lengths", rule, got, remedy) from error
    except ValueError as error:
        raise ValueError(f"`evenstep plan --lengths {lengths}`: {error}") from error


def lengths_part(
    run: RunTimes,
    width: int | None,
    lengths: str | None,
    *,
    padded: bool,
    hidden_size: int | None,
) -> Part | None:
    """Return steps with samples of such lengths, computing and overhead; None without any.

    Times are mean seconds of a step by the way in which its samples are split; the last is what no
    assignment beats. A sample of mean cost takes what the workers' speeds say, and no step differs
    by luck. The planners of training plan them; steps count once costs are learnt.

    Raises:
        ValueError: the lengths cannot be, or do not go together with caps; the message names
            the option.
    """
    if lengths is None:
        if padded or hidden_size is not None:
            option, remedy = "--padded" if padded else "--hidden-size", "Give the lengths too."
            raise refused("plan", option, "come with --lengths", "it alone", remedy)
        return None
    if run.max_batch_size is not None:
        rule = "be left out where batches have caps"
        remedy = "Caps count samples: leave out `--max`."
        raise refused("plan", "--lengths", rule, lengths, remedy)
    slope_s = np.tile(run.times.slope_s, (_LEARNING + _COUNTED, 1))
    workers = Scenario("plan", np.array(run.times.intercept_s), slope_s, np.ones_like(slope_s))
    hidden = 4096 if hidden_size is None else hidden_size
    total = run.global_batch_size
    steps_s, ruled = _split_steps(
        _workload(workers, lengths, total, padded=padded, hidden_size=hidden)
    )
    steps_s = [one + run.overhead_s for one in steps_s]
    values = dict(zip(_SPLIT_KEYS, steps_s, strict=True)) | {"ruled_by_sample": ruled}
    saved = [percent(1 - step_s / steps_s[0]) for step_s in steps_s[1:]]
    text = (
        f"Of a step with equal counts, speeds alone save {saved[0]} %, lengths alone {saved[1]} %, "
        f"both {saved[2]} %; no assignment saves more than {saved[3]} %."
    )
    if ruled >= 0.05:
        text += (
            f" In {percent(ruled)} % of the steps a single sample takes as long as the bound, so "
            "that only a shorter sample helps."
        )
    header = ["with these lengths", "step", "times as fast"]
    table = text_table(header, _compared(_SPLITS, steps_s), width=width)
    return values, f"{table}\n\n{paragraph(text, width)}"


def _split_steps(workload: SampleWorkload) -> tuple[list[float], float]:
    """Return the mean of a step for each of ``_SPLITS``, and in how many one sample is the bound.

    By the planners of training, without the steps in which costs are learnt.
    """
    cluster = Cluster(workload.world_size, workload.global_batch_size)
    asked = product((None, workload.lengths), ("equal", "auto"))
    runs = [sim.run(policy, cluster, workload, cost=cost) for cost, policy in asked]
    steps_s = [float(run.step_s[_LEARNING:].mean()) for run in runs]
    bounds = [workload.lower_bound_s(step) for step in range(_LEARNING, workload.num_steps)]
    ruled = fmean(reason == "sample" for _, reason in bounds)
    return [*steps_s, fmean(bound_s for bound_s, _ in bounds)], ruled


GIB, MIB = 2**30, 2**20
_STATES = {"adam": 2, "momentum": 1, "sgd": 0}  # numbers that are kept for each parameter
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}  # of a parameter, a gradient and a number of state
_PLANNED = 0.9  # of a memory; the rest is for the device's own buffers and what varies
_MORE = (
    "Where a batch is larger than one forward holds, `loader.steps()` makes micro-batches of it."
)
_WAYS = {
    "ddp": ("DDP", f"DDP fits on every worker: nothing needs to be sharded. {_MORE}"),
    "ddp_view": (
        "DDP, bucket view",
        f"DDP with `gradient_as_bucket_view=True` fits on every worker. {_MORE}",
    ),
    "fsdp2_accumulated": (
        "FSDP2, accumulated",
        f"FSDP2 fits on every worker, with several forwards a step too. {_MORE}",
    ),
    "fsdp2": ("FSDP2", "FSDP2 fits on every worker, with one forward a step."),
}
"""What they are called, and what to do if all before do not fit, from the usual one on."""


def memory_part(
    num_workers: int | None,
    width: int | None,
    *,
    parameters: float | None,
    memory: str | None,
    optimizer: str,
    dtype: str,
    layers: int,
    sample_mb: float | None,
) -> Part | None:
    """Return what fits, by the keys of ``_WAYS``; None if it was not asked for.

    Args:
        num_workers: of the plan; None if the memories alone say how many there are.
        width: of the terminal.
        parameters, memory, optimizer, dtype, layers, sample_mb: the options.

    Raises:
        ValueError: an option cannot be; the message names it.
    """
    if (parameters is None) != (memory is None):
        got = f"{'--parameters' if memory is None else '--memory'} alone"
        remedy = "Write `--parameters 1.3e9 --memory 24,24,12` say."
        raise refused("plan", "--parameters, --memory", "be given together", got, remedy)
    if parameters is None or memory is None:
        _check_alone(optimizer=optimizer, dtype=dtype, layers=layers, sample_mb=sample_mb)
        return None
    within("plan", "--parameters", parameters, 1, 1e18, "1.3e9 is 1.3 billion.")
    _one_of("--optimizer", optimizer, _STATES, "AdamW is adam, SGD with it momentum.")
    _one_of("--dtype", dtype, _ELEMENT_BYTES, "Under autocast parameters are float32.")
    least("plan", "--layers", layers, 1, "1 is a model that is sharded as a whole.")
    if sample_mb is not None:
        within("plan", "--sample-mb", sample_mb, 1e-6, 1e16, "Leave it out if unknown.")
    gib = numbers("plan", "--memory", memory)
    gib = spread("plan", "--memory", gib, num_workers or len(gib))
    plain = round(parameters) * _ELEMENT_BYTES[dtype]
    needs = _needs(plain, _STATES[optimizer], layers, len(gib))
    ways = {key: _way(need, gib, sample_mb) for key, need in needs.items()}
    head = f"{parameters:,.0f} parameters in {dtype}, {optimizer}"
    names = [f"{rank}: {number(each)} GiB" for rank, each in enumerate(gib)]
    rows = [
        [_WAYS[key][0], f"{number(way['need_bytes'] / GIB)} GiB", *_cells(way)]
        for key, way in ways.items()
    ]
    table = text_table(["on a worker", "needs", *names], rows, width=width)
    text = "\n\n".join([paragraph(head, width), table, paragraph(_memory_verdict(ways), width)])
    return {"memory_gib": list(gib), **ways}, text


def _needs(plain: int, states: int, layers: int, world_size: int) -> dict[str, int]:
    r"""Return the bytes that a rank needs before its first sample, by way to hold the model.

    With $P$ bytes of plain parameters, as many of gradients, $S P$ of state, $W$ ranks and $L$
    equal layers: $(3 + S) P$ in DDP, whose buckets hold gradients a second time; $(2 + S) P$ with
    ``gradient_as_bucket_view=True``; $(2 + S) P / W + 4 P / L$ in FSDP2, as two layers are gathered
    at once while the gradient of one is reduced; with several forwards a step $P$ more, for
    gradients that are not reduced yet. Buffers of the collectives come on top:
    over gloo they took 1.7 bytes a parameter in each way.
    """
    shard = math.ceil((2 + states) * plain / world_size)
    return {
        "ddp": (3 + states) * plain,
        "ddp_view": (2 + states) * plain,
        "fsdp2_accumulated": shard + math.ceil(4 * plain / layers) + plain,
        "fsdp2": shard + math.ceil(4 * plain / layers),
    }


def _way(need_bytes: int, memory_gib: Sequence[float], sample_mb: float | None) -> dict[str, Any]:
    """Return one way to hold the model.

    What each rank needs before its first sample, what it has left, below 0 where the model does not
    fit, and the samples that it can take in one forward; None if their size is unknown.
    """
    left = [math.floor(_PLANNED * round(each * GIB)) - need_bytes for each in memory_gib]
    samples = None
    if sample_mb is not None:
        samples = [int(max(0, each) // (sample_mb * MIB)) for each in left]
    return {"need_bytes": need_bytes, "left_bytes": left, "samples": samples}


def _fits(way: dict[str, Any]) -> list[bool]:
    """Return whether each rank holds the model and a sample."""
    return [each > 0 for each in way["samples"] or way["left_bytes"]]


def _cells(way: dict[str, Any]) -> list[str]:
    left = [f"{number(each / GIB)} GiB left" for each in way["left_bytes"]]
    if way["samples"] is not None:
        left = [f"{each} sample{'s' * (each != 1)}" for each in way["samples"]]
    return [text if fits else "no" for text, fits in zip(left, _fits(way), strict=True)]


def _memory_verdict(ways: dict[str, dict[str, Any]]) -> str:
    rest = f"{100 * (1 - _PLANNED):.0f} % of each memory is kept free."
    for key, way in ways.items():
        if all(_fits(way)):
            return f"{_WAYS[key][1]} {rest}"
    short = ", ".join(str(rank) for rank, fits in enumerate(_fits(ways["fsdp2"])) if not fits)
    return (
        f"The model does not fit on worker {short} in any way. FSDP2 needs the same on each "
        f"worker: take more workers, leave the smallest out, or take bfloat16. {rest}"
    )


def _check_alone(**given: object) -> None:
    """Raise for an option of memory that is given where there is no memory."""
    usual = {"optimizer": "adam", "dtype": "float32", "layers": 32, "sample_mb": None}
    for name, value in given.items():
        if value != usual[name]:
            remedy = "Write `--parameters 1.3e9 --memory 24,24,12` beside it."
            rule = "be given with --parameters and --memory"
            raise refused("plan", f"--{name.replace('_', '-')}", rule, value, remedy)


def _one_of(option: str, value: str, known: dict[str, int], remedy: str) -> None:
    if value not in known:
        raise refused("plan", option, f"be one of {', '.join(known)}", value, remedy)
