"""What workers do over a run, as a value: by name and seed, or with lengths that differ."""

from __future__ import annotations

from collections.abc import Callable
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
        _check("with_lengths(global_batch_size=...)", global_batch_size, least=1)
        _check("with_lengths(hidden_size=...)", hidden_size, least=0)
        _check("with_lengths(seed=...)", seed, least=0)
        if not isinstance(lengths, str):
            lengths = checked_lengths(lengths)
        elif lengths in DRAWN:
            lengths = draw_lengths(lengths, NUM_DRAWN, np.random.default_rng(seed))
        else:
            rule = f"be an array, or one of {', '.join(DRAWN)}"
            raise invalid("with_lengths(lengths=...)", rule, repr(lengths), "Or read a file.")
        square = lengths / (6 * hidden_size) if hidden_size else 0.0
        weight = lengths * (1.0 + square)
        return SampleWorkload(
            self.intercept_s,
            self.slope_s,
            self.jitter,
            lengths=lengths,
            order=_drawn_order(len(lengths), (self.num_steps, global_batch_size), seed),
            weight=weight / weight.mean(),
            padded=padded,
        )


def _drawn_order(num_samples: int, shape: tuple[int, int], seed: int) -> IntArray:
    """Return indices of each step's samples, in an order that is drawn anew in each epoch."""
    rng, needed = np.random.default_rng(seed), shape[0] * shape[1]
    epochs = [rng.permutation(num_samples) for _ in range(-(-needed // num_samples))]
    return np.concatenate(epochs)[:needed].reshape(shape)


def scenario_names() -> tuple[str, ...]:
    """Return what ``scenario`` knows.

    The eight that policies are compared on come first, then those past straight lines, free
    memory and a world that stays.
    """
    return (*_LINES, *_DIFFERENT)


def scenario(name: str, world_size: int = 8, num_steps: int = 600, seed: int = 0) -> Scenario:
    """Return the scenario called ``name``, the same for the same arguments.

    Of workers that differ, 1 to 4 ms a sample and 2 to 20 ms a step, each step off by 2 %, unless
    the table says otherwise. With 64 samples a worker the best plan's step takes about 0.1 s.

    | name | what happens |
    |---|---|
    | `static` | nothing |
    | `step` | six lasting changes: a worker's cost is halved, doubled or tripled |
    | `drift` | speeds wander, with a standard deviation of 30 % |
    | `burst` | 2.5 times slower for 20 steps at a time, a sixth of the time |
    | `jitter` | 2 % of the single worker-steps take 1.5 to 4 times as long |
    | `diurnal` | a sine of 200 steps, 50 % up and down, own phase each |
    | `correlated` | half of the workers 2.2 times slower together, now and then |
    | `square` | square waves of 90 steps, 40 % up and down, own phase each |
    | `spot` | every second worker leaves now and then and comes back (`presence`) |
    | `saturated` | devices that need 40 to 120 ms for whatever does not fill them (`saturation`) |
    | `capped` | memory for 48, 96 or 192 samples (`max_batch_size`) |
    | `mixed` | GPUs, and CPUs a hundred times slower with a smaller fixed cost |

    Choose constants of a policy on seeds from 1000, and report on lower ones.

    Args:
        name: one of ``scenario_names()``.
        world_size: number of workers, at least 1.
        num_steps: at least 1.
        seed: at least 0.

    Raises:
        ValueError: an argument is out of range.
    """
    if name not in scenario_names():
        remedy = "A recorded one is read by `sim.read_trace`."
        rule = f"be one of {', '.join(scenario_names())}"
        raise invalid("scenario(name=...)", rule, repr(name), remedy)
    _check("scenario(world_size=...)", world_size, least=1)
    _check("scenario(num_steps=...)", num_steps, least=1)
    _check("scenario(seed=...)", seed, least=0)
    draw = np.random.default_rng(seed)
    if name in _DIFFERENT:
        return _DIFFERENT[name](draw, world_size, num_steps)
    intercept_s, slope_s, jitter = _steady(draw, world_size, num_steps)
    _LINES[name](draw, slope_s, jitter)  # changes them in place
    return Scenario(name, intercept_s, slope_s, jitter)


def _check(where: str, value: int, *, least: int) -> None:
    if not isinstance(value, int | np.integer) or value < least:
        remedy = "Leave it out for the default, or give a whole number."
        raise invalid(where, f"be an integer >= {least}", repr(value), remedy)


Times = tuple[FloatArray, FloatArray, FloatArray]
"""Intercepts, slopes and jitter under construction: ``(W,)``, ``(T, W)`` and ``(T, W)``."""


def _steady(draw: Generator, world_size: int, num_steps: int) -> Times:
    """Return workers that differ, with nothing but 2 % of jitter."""
    base = 1e-3 * np.exp(draw.uniform(0, np.log(4), world_size))  # 1 to 4 ms a sample
    intercept_s = draw.uniform(2e-3, 2e-2, world_size)
    slope_s = np.tile(base, (num_steps, 1))
    jitter = np.exp(0.02 * draw.standard_normal((num_steps, world_size)))
    return intercept_s, slope_s, jitter


def _static(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Nothing happens."""


def _step(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Six lasting changes of one worker's cost."""
    num_steps, world_size = slope_s.shape
    for _ in range(6):
        worker, at = draw.integers(world_size), draw.integers(num_steps)
        slope_s[at:, worker] *= draw.choice([0.5, 2.0, 3.0])


def _drift(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Ornstein-Uhlenbeck in the logarithm, about 30 % standard deviation."""
    at = np.zeros(slope_s.shape[1])
    for row in slope_s:
        at = 0.98 * at + 0.06 * draw.standard_normal(len(at))
        row *= np.exp(at)


def _burst(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """On with 1 % a step, off with 5 %, 2.5 times slower while on."""
    on = np.zeros(slope_s.shape[1], np.bool_)
    for row in slope_s:
        on = np.where(on, draw.random(len(on)) > 0.05, draw.random(len(on)) < 0.01)
        row *= np.where(on, 2.5, 1.0)


def _jitter(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """2 % of the single worker-steps take 1.5 to 4 times as long."""
    shape = jitter.shape
    jitter[:] *= np.where(draw.random(shape) < 0.02, draw.uniform(1.5, 4.0, shape), 1.0)


def _diurnal(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """A sine of period 200 steps, own phase each."""
    slope_s[:] *= 1 + 0.5 * np.sin(_angle(draw, slope_s, 200))


def _correlated(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Half of the workers share a host, 2.2 times slower now and then."""
    num_steps, world_size = slope_s.shape
    shared = np.cumsum(draw.random(num_steps) < 0.012) % 2
    slope_s[:, : world_size // 2] *= np.where(shared, 2.2, 1.0)[:, np.newaxis]


def _square(draw: Generator, slope_s: FloatArray, jitter: FloatArray) -> None:
    """Square waves of period 90 steps, own phase each."""
    slope_s[:] *= 1 + 0.4 * np.sign(np.sin(_angle(draw, slope_s, 90)))


def _angle(draw: Generator, slope_s: FloatArray, period: int) -> FloatArray:
    num_steps, world_size = slope_s.shape
    turns = 2 * np.pi * np.arange(num_steps)[:, np.newaxis] / period
    angle: FloatArray = turns + draw.uniform(0, 2 * np.pi, world_size)
    return angle


_LINES: dict[str, Callable[[Generator, FloatArray, FloatArray], None]] = {
    "static": _static,
    "step": _step,
    "drift": _drift,
    "burst": _burst,
    "jitter": _jitter,
    "diurnal": _diurnal,
    "correlated": _correlated,
    "square": _square,
}


def _spot(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Every second worker is reclaimed with 0.5 % a step and replaced with 2 %; the rest stay."""
    times = _steady(draw, world_size, num_steps)
    presence = np.empty((num_steps, world_size), np.bool_)
    on_demand = np.arange(world_size) % 2 == 0
    here = np.ones(world_size, np.bool_)
    for row in presence:
        luck = draw.random(world_size)
        here = np.where(here, luck > 0.005, luck < 0.02) | on_demand
        row[:] = here
    return Scenario("spot", *times, presence=presence)


def _saturated(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Devices that take 40 to 120 ms for anything that does not fill them."""
    times = _steady(draw, world_size, num_steps)
    flat_s = draw.uniform(0.04, 0.12, world_size)
    saturation = np.round(flat_s / times[1][0]).astype(np.int64)
    return Scenario("saturated", *times, saturation=saturation)


def _capped(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """Memory for three sizes on every worker; 96 samples or more a worker fit on the whole."""
    times = _steady(draw, world_size, num_steps)
    caps = draw.permutation(np.resize([192, 48, 96], world_size))
    return Scenario("capped", *times, max_batch_size=caps)


def _mixed(draw: Generator, world_size: int, num_steps: int) -> Scenario:
    """GPUs at 20 to 80 us a sample and 5 to 20 ms a step; every second worker a CPU.

    The CPUs take 2 to 8 ms a sample and 1 to 5 ms a step.
    """
    is_cpu = np.arange(world_size) % 2 == 1
    factor = np.exp(draw.uniform(0, np.log(4), world_size))
    base = np.where(is_cpu, 2e-3, 2e-5) * factor
    low_s, high_s = np.where(is_cpu, 1e-3, 5e-3), np.where(is_cpu, 5e-3, 2e-2)
    intercept_s = draw.uniform(low_s, high_s)
    jitter = np.exp(0.02 * draw.standard_normal((num_steps, world_size)))
    return Scenario("mixed", intercept_s, np.tile(base, (num_steps, 1)), jitter)


_DIFFERENT: dict[str, Callable[[Generator, int, int], Scenario]] = {
    "spot": _spot,
    "saturated": _saturated,
    "capped": _capped,
    "mixed": _mixed,
}
