"""What ``evenstep plan`` says beside speeds: links, lengths of samples, and memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer

from .. import sim
from .._render import number, paragraph, percent, seconds, text_table
from .._types import Cluster, FloatArray
from ..network import Aggregation, Links, optimal_shares
from ..network._plans._optimum import equal_shares
from ..network.sim import step_over_links_s
from ..sim import Scenario
from ..sim._sample_workload import SampleWorkload
from ..sim._scenario import DRAWN, read_lengths
from ._common import check_ends, least, numbers, refused, spread, within
from ._plan_text import Question

MBIT = 125_000
_MOST_CHUNKS = 10_000  # they are exchanged one by one

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


@dataclass(frozen=True, slots=True, eq=False)
class LinkAnswer:
    """Steps with the exchange of gradients counted, in seconds.

    Attributes:
        ranks: what the workers are called, ``(world_size,)``.
        mbit: what each worker's link carries, in Mbit/s, ``(world_size,)``.
        aggregation: what is summed, in how many chunks.
        overlap: part of computing during which gradients become ready.
        plain_s: balanced batch sizes and plain all-reduce.
        equal_s: balanced batch sizes and equal shares.
        best_s: balanced batch sizes and the best shares.
        best_shares: those, ``(world_size,)``.
    """

    ranks: tuple[int, ...]
    mbit: FloatArray
    aggregation: Aggregation
    overlap: float
    plain_s: float
    equal_s: float
    best_s: float
    best_shares: FloatArray


def answer_links(
    question: Question,
    batch_size: tuple[int, ...],
    *,
    mbit: str | None,
    model_mb: float | None,
    chunks: int,
    overlap: float,
    overhead_s: float,
) -> LinkAnswer | None:
    """Return what links change; None if they were not given."""
    if (mbit is None) != (model_mb is None):
        got = f"{'--mbit' if mbit else '--model-mb'} alone"
        remedy = "Write `--mbit 200,200,50 --model-mb 100` say."
        raise refused("plan", "--mbit, --model-mb", "be given together", got, remedy)
    if mbit is None or model_mb is None:
        return None
    remedy = "4 bytes a parameter: 100 for 25 million."
    within("plan", "--model-mb", model_mb, 0.001, 1e16, remedy)
    remedy = "1 is a barrier between push and pull; past 64 hardly anything changes."
    within("plan", "--chunks", chunks, 1, _MOST_CHUNKS, remedy)
    if not 0 <= overlap <= 1:
        remedy = "0 exchanges at the end, 0.67 during the backward."
        raise refused("plan", "--overlap", "be in [0, 1]", overlap, remedy)
    size = question.times.world_size
    given = spread("plan", "--mbit", numbers("plan", "--mbit", mbit), size, like="the plan")
    links = Links(np.array(given) * MBIT)
    aggregation = Aggregation(size, round(model_mb * 250_000) * 4, num_chunks=chunks)
    shares, compute_s = optimal_shares(aggregation, links), question.times.seconds(_of(batch_size))
    plain_s, equal_s, best_s = (
        step_over_links_s(compute_s, aggregation, links, shares=each, overlap=overlap) + overhead_s
        for each in (None, equal_shares(aggregation), shares)
    )
    return LinkAnswer(
        question.ranks, np.array(given), aggregation, overlap, plain_s, equal_s, best_s, shares
    )


def links_text(answer: LinkAnswer, width: int | None = None) -> str:
    """Return the answer in words and tables, for a terminal of ``width`` columns or of any."""
    megabytes = number(answer.aggregation.num_bytes / 1e6)
    rows = [
        [name, seconds(step_s), f"{answer.plain_s / step_s:.2f}"]
        for name, step_s in (
            ("balanced, plain all-reduce", answer.plain_s),
            ("balanced, equal shares", answer.equal_s),
            ("balanced, best shares", answer.best_s),
        )
    ]
    workers = [
        [str(rank), number(float(mbit)), f"{100 * share:.0f} %"]
        for rank, mbit, share in zip(answer.ranks, answer.mbit, answer.best_shares, strict=True)
    ]
    names = [f"with {megabytes} MB of gradients", "step", "times as fast"]
    steps = text_table(names, rows, width=width)
    each = text_table(["worker", "Mbit/s", "best share"], workers, width=width)
    return "\n\n".join([steps, each, paragraph(_links_verdict(answer), width)])


def links_json(answer: LinkAnswer) -> dict[str, Any]:
    """Return the answer as plain values, times in seconds and shares as fractions of 1."""
    return {
        "mbit": answer.mbit.tolist(),
        "num_bytes": answer.aggregation.num_bytes,
        "num_chunks": answer.aggregation.num_chunks,
        "overlap": answer.overlap,
        "plain_s": answer.plain_s,
        "equal_s": answer.equal_s,
        "best_s": answer.best_s,
        "best_shares": answer.best_shares.tolist(),
    }


def _links_verdict(answer: LinkAnswer) -> str:
    saved = 1 - answer.best_s / answer.plain_s
    if saved < 0.01:
        return "No shares are faster than plain all-reduce on these links."
    return f"The best shares make a step {percent(saved)} % shorter than plain all-reduce does."


def _of(batch_size: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(batch_size, np.int64)


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
_MOST_DRAWN = 10**8  # samples of all steps: a gigabyte
_LEARNING, _COUNTED = 40, 60  # steps until costs are learnt, and those that `plan` shows
_SPLITS = ("equal counts", "by speed alone", "by length alone", "by both", "lower bound")


@dataclass(frozen=True, slots=True)
class LengthSplits:
    """Mean seconds of a step by the way in which its samples are split.

    Attributes:
        equal_s: as many samples for each worker.
        speed_s: counts by the workers' speeds, lengths unknown.
        length_s: by length, workers taken for equally fast.
        both_s: by length and speed.
        bound_s: what no assignment beats.
        ruled_by_sample: share of the steps whose bound is a single sample, in [0, 1].
    """

    equal_s: float
    speed_s: float
    length_s: float
    both_s: float
    bound_s: float
    ruled_by_sample: float

    @property
    def steps_s(self) -> tuple[float, ...]:
        """In the order of ``_SPLITS``."""
        return self.equal_s, self.speed_s, self.length_s, self.both_s, self.bound_s

    def longer(self, overhead_s: float) -> LengthSplits:
        """Return it with ``overhead_s`` more in every step."""
        equal_s, speed_s, length_s, both_s, bound_s = [one + overhead_s for one in self.steps_s]
        return LengthSplits(equal_s, speed_s, length_s, both_s, bound_s, self.ruled_by_sample)


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


def split_steps(workload: SampleWorkload, *, skip: int) -> LengthSplits:
    """Return what steps take by the planners of training, without the first ``skip`` of them."""
    cluster = Cluster(workload.world_size, workload.global_batch_size)
    asked = product((None, workload.lengths), ("equal", "auto"))
    runs = [sim.run(policy, cluster, workload, cost=cost) for cost, policy in asked]
    equal_s, speed_s, length_s, both_s = [float(run.step_s[skip:].mean()) for run in runs]
    bounds = [workload.lower_bound_s(step) for step in range(skip, workload.num_steps)]
    bound_s = fmean(bound_s for bound_s, _ in bounds)
    ruled = fmean(reason == "sample" for _, reason in bounds)
    return LengthSplits(equal_s, speed_s, length_s, both_s, bound_s, ruled)


def savings(splits: LengthSplits) -> str:
    """Return in a sentence or two what each would save alone."""
    saved = [percent(1 - step_s / splits.equal_s) for step_s in splits.steps_s[1:]]
    text = (
        f"Of a step with equal counts, speeds alone save {saved[0]} %, lengths alone {saved[1]} %, "
        f"both {saved[2]} %; no assignment saves more than {saved[3]} %."
    )
    if splits.ruled_by_sample >= 0.05:
        text += (
            f" In {percent(splits.ruled_by_sample)} % of the steps a single sample takes as long "
            "as the bound, so that only a shorter sample helps."
        )
    return text


def answer_lengths(
    question: Question, lengths: str | None, *, padded: bool, hidden_size: int | None
) -> LengthSplits | None:
    """Return steps with samples of such lengths, computing and overhead; None without any.

    A sample of mean cost takes what the workers' speeds say, and no step differs by luck. The
    planners of training plan them; steps count once costs are learnt.

    Raises:
        ValueError: the lengths cannot be, or do not go together with caps; the message names
            the option.
    """
    if lengths is None:
        if padded or hidden_size is not None:
            option, remedy = "--padded" if padded else "--hidden-size", "Give the lengths too."
            raise refused("plan", option, "come with --lengths", "it alone", remedy)
        return None
    if question.max_batch_size is not None:
        rule, remedy = (
            "be left out where batches have caps",
            "Caps count samples: leave out `--max`.",
        )
        raise refused("plan", "--lengths", rule, lengths, remedy)
    slope_s = np.tile(question.times.slope_s, (_LEARNING + _COUNTED, 1))
    fixed_s = np.array(question.times.intercept_s)
    workers = Scenario("plan", fixed_s, slope_s, np.ones_like(slope_s))
    total = question.global_batch_size
    hidden = 4096 if hidden_size is None else hidden_size
    workload = _workload(workers, lengths, total, padded=padded, hidden_size=hidden)
    return split_steps(workload, skip=_LEARNING).longer(question.overhead_s)


def splits_as_text(splits: LengthSplits, width: int | None) -> str:
    """Return the answer as a table and a sentence, for a terminal."""
    rows = [
        [way, seconds(step_s), f"{splits.equal_s / step_s:.2f}"]
        for way, step_s in zip(_SPLITS, splits.steps_s, strict=True)
    ]
    table = text_table(["with these lengths", "step", "times as fast"], rows, width=width)
    return f"{table}\n\n{paragraph(savings(splits), width)}"


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


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """The options of memory, as typed."""

    parameters: float | None
    memory: str | None
    optimizer: str = "adam"
    dtype: str = "float32"
    layers: int = 32
    sample_mb: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether there is a model or a memory to answer for."""
        return self.parameters is not None or self.memory is not None


@dataclass(frozen=True, slots=True)
class WayToHold:
    """One way to hold the model.

    Attributes:
        need_bytes: on each rank, before its first sample.
        left_bytes: what each rank has left for samples; below 0 where the model does not fit.
        samples: that each rank can take in one forward; None if their size is unknown.
    """

    need_bytes: int
    left_bytes: tuple[int, ...]
    samples: tuple[int, ...] | None

    @property
    def fits(self) -> tuple[bool, ...]:
        """Whether each rank holds the model and a sample."""
        if self.samples is not None:
            return tuple(each > 0 for each in self.samples)
        return tuple(each > 0 for each in self.left_bytes)


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """Each way to hold the model, by the keys of ``_WAYS``, beside each worker's memory."""

    asked: MemoryQuestion
    memory_gib: tuple[float, ...]
    ways: dict[str, WayToHold]


def answer_memory(asked: MemoryQuestion, num_workers: int | None) -> MemoryAnswer | None:
    """Return what fits; None if it was not asked for.

    Args:
        asked: the options.
        num_workers: of the plan; None if the memories alone say how many there are.

    Raises:
        ValueError: an option cannot be; the message names it.
    """
    parameters = asked.parameters
    if (parameters is None) != (asked.memory is None):
        got = f"{'--parameters' if asked.memory is None else '--memory'} alone"
        remedy = "Write `--parameters 1.3e9 --memory 24,24,12` say."
        raise refused("plan", "--parameters, --memory", "be given together", got, remedy)
    if parameters is None or asked.memory is None:
        _check_alone(asked)
        return None
    within("plan", "--parameters", parameters, 1, 1e18, "1.3e9 is 1.3 billion.")
    _one_of("--optimizer", asked.optimizer, _STATES, "AdamW is adam, SGD with it momentum.")
    _one_of("--dtype", asked.dtype, _ELEMENT_BYTES, "Under autocast parameters are float32.")
    least("plan", "--layers", asked.layers, 1, "1 is a model that is sharded as a whole.")
    sample_mb = asked.sample_mb
    if sample_mb is not None:
        within("plan", "--sample-mb", sample_mb, 1e-6, 1e16, "Leave it out if unknown.")
    gib = numbers("plan", "--memory", asked.memory)
    gib = spread("plan", "--memory", gib, num_workers or len(gib), like="the plan")
    needs = _needs(asked, round(parameters), len(gib))
    held = [round(each * GIB) for each in gib]
    return MemoryAnswer(
        asked, gib, {key: _way(need, held, sample_mb) for key, need in needs.items()}
    )


def _needs(asked: MemoryQuestion, parameters: int, world_size: int) -> dict[str, int]:
    r"""Return the bytes that a rank needs before its first sample, by way to hold the model.

    With $P$ bytes of parameters, as many of gradients, $S P$ of state, $W$ ranks and $L$ equal
    layers: $(3 + S) P$ in DDP, whose buckets hold gradients a second time; $(2 + S) P$ with
    ``gradient_as_bucket_view=True``; $(2 + S) P / W + 4 P / L$ in FSDP2, as two layers are gathered
    at once while the gradient of one is reduced; with several forwards a step $P$ more, for
    gradients that are not reduced yet. Buffers of the collectives come on top:
    over gloo they took 1.7 bytes a parameter in each way.
    """
    states, plain = _STATES[asked.optimizer], parameters * _ELEMENT_BYTES[asked.dtype]
    shard = math.ceil((2 + states) * plain / world_size)
    return {
        "ddp": (3 + states) * plain,
        "ddp_view": (2 + states) * plain,
        "fsdp2_accumulated": shard + math.ceil(4 * plain / asked.layers) + plain,
        "fsdp2": shard + math.ceil(4 * plain / asked.layers),
    }


def memory_text(answer: MemoryAnswer, width: int | None = None) -> str:
    """Return the answer as a table and a sentence, for a terminal."""
    asked = answer.asked
    assert asked.parameters is not None
    head = f"{asked.parameters:,.0f} parameters in {asked.dtype}, {asked.optimizer}"
    names = [f"{rank}: {number(gib)} GiB" for rank, gib in enumerate(answer.memory_gib)]
    rows = [
        [_WAYS[key][0], f"{number(way.need_bytes / GIB)} GiB", *_cells(way)]
        for key, way in answer.ways.items()
    ]
    table = text_table(["on a worker", "needs", *names], rows, width=width)
    return "\n\n".join([paragraph(head, width), table, paragraph(_memory_verdict(answer), width)])


def memory_json(answer: MemoryAnswer) -> dict[str, Any]:
    """Return the answer as plain values, in bytes."""
    ways = {key: asdict(way) for key, way in answer.ways.items()}
    return {"memory_gib": list(answer.memory_gib), **ways}


def _way(need_bytes: int, memory_bytes: list[int], sample_mb: float | None) -> WayToHold:
    left = tuple(math.floor(_PLANNED * each) - need_bytes for each in memory_bytes)
    if sample_mb is None:
        return WayToHold(need_bytes, left, None)
    samples = tuple(int(max(0, each) // (sample_mb * MIB)) for each in left)
    return WayToHold(need_bytes, left, samples)


def _cells(way: WayToHold) -> list[str]:
    left = [f"{number(each / GIB)} GiB left" for each in way.left_bytes]
    if way.samples is not None:
        left = [f"{each} sample{'s' * (each != 1)}" for each in way.samples]
    return [text if fits else "no" for text, fits in zip(left, way.fits, strict=True)]


def _memory_verdict(answer: MemoryAnswer) -> str:
    rest = f"{100 * (1 - _PLANNED):.0f} % of each memory is kept free."
    for key, way in answer.ways.items():
        if all(way.fits):
            return f"{_WAYS[key][1]} {rest}"
    last = answer.ways["fsdp2"]
    short = ", ".join(str(rank) for rank, fits in enumerate(last.fits) if not fits)
    return (
        f"The model does not fit on worker {short} in any way. FSDP2 needs the same on each "
        f"worker: take more workers, leave the smallest out, or take bfloat16. {rest}"
    )


def _check_alone(asked: MemoryQuestion) -> None:
    """Raise for an option of memory that is given where there is no memory."""
    usual = MemoryQuestion(None, None)
    for name in ("optimizer", "dtype", "layers", "sample_mb"):
        if (value := getattr(asked, name)) != getattr(usual, name):
            remedy = "Write `--parameters 1.3e9 --memory 24,24,12` beside it."
            rule = "be given with --parameters and --memory"
            raise refused("plan", f"--{name.replace('_', '-')}", rule, value, remedy)


def _one_of(option: str, value: str, known: dict[str, int], remedy: str) -> None:
    if value not in known:
        raise refused("plan", option, f"be one of {', '.join(known)}", value, remedy)
