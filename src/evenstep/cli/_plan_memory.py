"""What ``evenstep plan`` says of memory: whether a model fits on each worker, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from .._render._words import number, paragraph, text_table
from ..advice._memory_needs import ELEMENT_BYTES, PLANNED, STATES, left_bytes, memory_needs
from ._common import least, numbers, refused, spread, within

GIB, MIB = 2**30, 2**20
WAYS = {
    "ddp_bytes": "DDP",
    "ddp_view_bytes": "DDP, bucket view",
    "fsdp2_steps_bytes": "FSDP2, in steps",
    "fsdp2_bytes": "FSDP2, plain loop",
}
"""From the one that is usual to the one that needs least."""
MORE = "Where a batch is larger than one forward holds, `loader.steps()` makes micro-batches of it."
REMEDIES = {
    "ddp_bytes": f"DDP fits on every worker: nothing needs to be sharded. {MORE}",
    "ddp_view_bytes": f"DDP with `gradient_as_bucket_view=True` fits on every worker. {MORE}",
    "fsdp2_steps_bytes": f"FSDP2 fits on every worker, in `loader.steps()` too. {MORE}",
    "fsdp2_bytes": "FSDP2 fits on every worker in loops over whole batches, one forward each.",
}
"""What to do, for the first of the ways that fits on every worker."""

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
    """Each way to hold the model, by the keys of ``WAYS``, beside each worker's memory."""

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
    _one_of("--optimizer", asked.optimizer, STATES, "AdamW is adam, SGD with momentum is momentum.")
    _one_of("--dtype", asked.dtype, ELEMENT_BYTES, "Under autocast parameters are float32.")
    least("plan", "--layers", asked.layers, 1, "1 is a model that is sharded as a whole.")
    sample_mb = asked.sample_mb
    if sample_mb is not None:
        within("plan", "--sample-mb", sample_mb, 1e-6, 1e16, "Leave it out if unknown.")
    gib = numbers("plan", "--memory", asked.memory)
    gib = spread("plan", "--memory", gib, num_workers or len(gib), like="the plan")
    needs = memory_needs(
        round(parameters),
        len(gib),
        optimizer=asked.optimizer,
        dtype=asked.dtype,
        num_layers=asked.layers,
    )
    held = [round(each * GIB) for each in gib]
    ways = {key: _way(getattr(needs, key), held, sample_mb) for key in WAYS}
    return MemoryAnswer(asked, gib, ways)


def memory_text(answer: MemoryAnswer, width: int | None = None) -> str:
    """Return the answer as a table and a sentence, for a terminal."""
    asked = answer.asked
    assert asked.parameters is not None
    head = f"{asked.parameters:,.0f} parameters in {asked.dtype}, {asked.optimizer}"
    names = [f"{rank}: {number(gib)} GiB" for rank, gib in enumerate(answer.memory_gib)]
    rows = [
        [WAYS[key], f"{number(way.need_bytes / GIB)} GiB", *_cells(way)]
        for key, way in answer.ways.items()
    ]
    table = text_table(["on a worker", "needs", *names], rows, width=width)
    return "\n\n".join([paragraph(head, width), table, paragraph(_verdict(answer), width)])


def memory_json(answer: MemoryAnswer) -> dict[str, Any]:
    """Return the answer as plain values, in bytes."""
    ways = {key.removesuffix("_bytes"): asdict(way) for key, way in answer.ways.items()}
    return {"memory_gib": list(answer.memory_gib), **ways}


def _way(need_bytes: int, memory_bytes: list[int], sample_mb: float | None) -> WayToHold:
    left = left_bytes(need_bytes, memory_bytes)
    if sample_mb is None:
        return WayToHold(need_bytes, left, None)
    return WayToHold(
        need_bytes, left, tuple(int(max(0, each) // (sample_mb * MIB)) for each in left)
    )


def _cells(way: WayToHold) -> list[str]:
    left = [f"{number(each / GIB)} GiB left" for each in way.left_bytes]
    if way.samples is not None:
        left = [f"{each} sample{'s' * (each != 1)}" for each in way.samples]
    return [text if fits else "no" for text, fits in zip(left, way.fits, strict=True)]


def _verdict(answer: MemoryAnswer) -> str:
    rest = f"{100 * (1 - PLANNED):.0f} % of each memory is kept free."
    for key, way in answer.ways.items():
        if all(way.fits):
            return f"{REMEDIES[key]} {rest}"
    last = answer.ways["fsdp2_bytes"]
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
