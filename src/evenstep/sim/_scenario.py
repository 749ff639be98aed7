"""What workers do over a run, as a value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from .._types import Cluster, FloatArray, IntArray
from ..exceptions import invalid
from ._sample_workload import SampleWorkload
from ._workload import BoolArray, Workload

DRAWN = ("fine-tuning", "long-tails", "uniform")
NUM_DRAWN = 1 << 14


def draw_lengths(kind: str, num_samples: int, rng: Generator) -> IntArray:
    """Return lengths in tokens, ``(num_samples,)``.

    ``"fine-tuning"`` and ``"long-tails"`` are log-normal about 245 tokens, with a spread of 0.8
    and 1.5, up to 16,384 tokens; ``"uniform"`` is from 1 to 2,048.
    """
    if kind == "uniform":
        return rng.integers(1, 2049, num_samples)
    spread = {"fine-tuning": 0.8, "long-tails": 1.5}[kind]
    return np.clip(np.exp(rng.normal(5.5, spread, num_samples)), 1, 16384).astype(np.int64)


def read_lengths(path: str | Path) -> IntArray:
    """Return the lengths in a file: a ``.npy`` of integers, or text with one length in a line.

    Raises:
        ValueError: it holds anything else.
        OSError: it cannot be read.
    """
    file = Path(path)
    try:
        if file.suffix == ".npy":
            return checked_lengths(np.load(file, allow_pickle=False))
        return checked_lengths([int(line) for line in file.read_text("utf-8-sig").split()])
    except (ValueError, EOFError) as error:  # no number, no text, or a `.npy` without a byte
        rule = "hold the length of each sample, as text or as `.npy`"
        remedy = "Write one integer in each line."
        raise invalid("read_lengths(path=...)", rule, f"{file} ({error})", remedy) from error


def checked_lengths(values: Any) -> IntArray:
    """Return lengths as integers, ``(num_samples,)``, or raise."""
    found = np.asarray(values)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size or found.min() < 1:
        got = f"{found.dtype} of shape {found.shape}"
        rule = "be integers of at least 1, one for each sample"
        raise invalid("with_lengths(lengths=...)", rule, got, "Count tokens, pixels or nodes.")
    return found.astype(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """The speeds of workers over a run, drawn by name or recorded.

    Attributes:
        name: of the scenario, or of the file it was read from.
        intercept_s: fixed cost of a step, ``(world_size,)``.
        slope_s: cost of a sample, ``(num_steps, world_size)``.
        jitter: factors on the whole, likewise.
        saturation: samples up to which any batch takes the same time, ``(world_size,)``; None is
            a straight line.
        max_batch_size: most samples that fit in memory, ``(world_size,)``; None is no cap.
        presence: which workers are there, ``(num_steps, world_size)``; None is always all.
    """

    name: str
    intercept_s: FloatArray
    slope_s: FloatArray
    jitter: FloatArray
    saturation: IntArray | None = None
    max_batch_size: IntArray | None = None
    presence: BoolArray | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value = value.copy()
                value.flags.writeable = False
                object.__setattr__(self, field.name, value)  # past the frozen guard

    @property
    def world_size(self) -> int:
        """Number of workers over the whole run."""
        return len(self.intercept_s)

    @property
    def num_steps(self) -> int:
        """Steps for which times are given."""
        return len(self.slope_s)

    @property
    def workload(self) -> Workload:
        """Its times and members, for ``run`` and ``oracle``."""
        return Workload(self.intercept_s, self.slope_s, self.jitter, self.saturation, self.presence)

    def cluster(self, global_batch_size: int) -> Cluster:
        """Return the cluster of its workers, within their caps.

        Raises:
            ValueError: the caps do not hold the global batch.
        """
        return Cluster(self.world_size, global_batch_size, max_batch_size=self.max_batch_size)

    def with_lengths(
        self,
        lengths: Any,
        global_batch_size: int,
        *,
        padded: bool = False,
        hidden_size: int = 4096,
        seed: int = 0,
    ) -> SampleWorkload:
        r"""Return its workers with samples of these lengths, for ``run``.

        A sample of length $L$ costs $L + L^2 / (6 h)$, as in a transformer with a hidden size of
        $h$. A sample of mean cost takes as long as a sample without lengths.

        Usage:
            work = sim.scenario("static").with_lengths("fine-tuning", 512)
            sim.run("auto", cluster, work)  # speeds alone
            sim.run("auto", cluster, work, cost=work.lengths)  # as Balancer(cost=...)

        Args:
            lengths: of all samples, integers of at least 1, ``(num_samples,)``; or
                ``"fine-tuning"``, ``"long-tails"`` or ``"uniform"``, of which 16,384 are drawn.
            global_batch_size: samples per step, drawn without replacement in each epoch.
            padded: whether each sample of a worker takes as long as its longest one.
            hidden_size: $h$; with 0, costs are in proportion to the length.
            seed: of lengths and their order, at least 0.

        Raises:
            ValueError: an argument is out of range; or the scenario has devices to fill, caps in
                samples, or workers that leave, which cannot be combined with lengths.
        """
        own = {name: getattr(self, name) for name in ("saturation", "max_batch_size", "presence")}
        own = {name: value for name, value in own.items() if value is not None}
        if own:
            rule, remedy = "have nothing but times", "Take one of the first eight scenarios."
            raise invalid("Scenario.with_lengths", rule, ", ".join(own), remedy)
        for name, value, least in (
            ("global_batch_size", global_batch_size, 1),
            ("hidden_size", hidden_size, 0),
            ("seed", seed, 0),
        ):
            if value < least:
                remedy = "The default is a hidden size of 4096, and seed 0."
                raise invalid(f"with_lengths({name}=...)", f"be at least {least}", value, remedy)
        if not isinstance(lengths, str):
            lengths = checked_lengths(lengths)
        elif lengths in DRAWN:
            lengths = draw_lengths(lengths, NUM_DRAWN, np.random.default_rng(seed))
        else:
            rule = f"be an array, or one of {', '.join(DRAWN)}"
            raise invalid("with_lengths(lengths=...)", rule, repr(lengths), "Or read a file.")
        return SampleWorkload.drawn(
            self.workload,
            lengths,
            global_batch_size,
            padded=padded,
            hidden_size=hidden_size,
            seed=seed,
        )
