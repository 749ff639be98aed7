"""From events to metrics: the one list of names that all adapters share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, final

from ..events import (
    BalancingStopped,
    Event,
    ExchangeMeasured,
    LossNotFinite,
    MeasurementRejected,
    PolicyFailed,
    PolicySlow,
    Rebalanced,
    RunStarted,
    StepMeasured,
    StepsAccounted,
    WaitingDiagnosed,
    WorkerLost,
)
from ..exceptions import invalid

MOST_RANKS: Final = 256
"""With more, a series for each rank is too much for what stores them."""

_QUANTILES: Final = (0.0, 0.5, 0.9, 1.0)
_WORST: Final = 8  # ranks that have a series of their own where others have none

_FAULTS: Final = (
    BalancingStopped,
    LossNotFinite,
    MeasurementRejected,
    PolicyFailed,
    PolicySlow,
    WorkerLost,
)

Labels = tuple[tuple[str, str], ...]


class Metric(NamedTuple):
    """What is measured.

    Attributes:
        name: with dots, its unit last.
        unit: as UCUM has it: ``"s"``, ``"1"`` for a share, ``"{sample}"``.
        help: what it is, in a sentence.
    """

    name: str
    unit: str
    help: str


class MetricValue(NamedTuple):
    """One value of a metric."""

    name: str
    value: float
    labels: Labels = ()


GAUGES: Final = (
    Metric("evenstep.run.world_size", "{worker}", "Workers of the run."),
    Metric("evenstep.run.global_batch_size", "{sample}", "Samples of a step, all workers."),
    Metric("evenstep.step.wall_s", "s", "Time from one batch to the next on rank 0."),
    Metric("evenstep.step.makespan_s", "s", "Own computing of the slowest worker."),
    Metric("evenstep.step.equal_split_s", "s", "The same, had all had equal batches."),
    Metric("evenstep.step.best_split_s", "s", "The same, with the best split by the fit."),
    Metric("evenstep.step.exchange_s", "s", "Exchange of gradients by shares."),
    Metric("evenstep.step.idle_share", "1", "Part of all workers' computing time spent waiting."),
    Metric("evenstep.step.waiting_share", "1", "Part of all time spent waiting, as diagnosed."),
    Metric("evenstep.rank.batch_size", "{sample}", "Samples computed."),
    Metric("evenstep.rank.compute_s", "s", "Own forward and backward, without waiting."),
    Metric("evenstep.rank.data_s", "s", "Waiting for input."),
    Metric("evenstep.rank.idle_s", "s", "Waiting for the slowest rank's computing."),
    Metric("evenstep.ranks.batch_size", "{sample}", "Quantiles over many ranks."),
    Metric("evenstep.ranks.compute_s", "s", "Quantiles over many ranks."),
    Metric("evenstep.ranks.data_s", "s", "Quantiles over many ranks."),
    Metric("evenstep.ranks.idle_s", "s", "Quantiles over many ranks."),
)
"""Those that go up and down. Of many ranks, quantiles and the largest values."""

COUNTERS: Final = (
    Metric("evenstep.steps", "{step}", "Optimizer steps that were measured."),
    Metric("evenstep.samples", "{sample}", "Samples computed in them."),
    Metric("evenstep.plans", "{plan}", "Changes of the batch sizes."),
    Metric("evenstep.phase_s", "s", "Where the time of all ranks went, by phase."),
    Metric("evenstep.faults", "{fault}", "Faults that training went on after, or a lost worker."),
)
"""Those that only grow."""


def gauges_of(event: Event, *, most_ranks: int = MOST_RANKS) -> Iterator[MetricValue]:
    """Yield what is true as of ``event``.

    Args:
        event: that happened.
        most_ranks: with more, quantiles stand for them, and the largest values.
    """
    match event:
        case RunStarted():
            yield MetricValue("evenstep.run.world_size", event.world_size)
            yield MetricValue("evenstep.run.global_batch_size", event.global_batch_size)
        case StepMeasured():
            for name in ("wall_s", "makespan_s", "equal_split_s", "best_split_s", "idle_share"):
                if (value := getattr(event, name)) is not None:
                    yield MetricValue(f"evenstep.step.{name}", value)
            for name in ("batch_size", "compute_s", "data_s", "idle_s"):
                yield from _by_rank(name, getattr(event, name), most_ranks)
        case ExchangeMeasured():
            yield MetricValue("evenstep.step.exchange_s", event.exchange_s)
        case WaitingDiagnosed():
            yield MetricValue("evenstep.step.waiting_share", event.waiting_share)


def counts_of(event: Event) -> Iterator[MetricValue]:
    """Yield by how much ``event`` makes counters grow."""
    match event:
        case StepMeasured():
            yield MetricValue("evenstep.steps", event.num_steps)
            yield MetricValue("evenstep.samples", event.num_steps * sum(event.batch_size))
        case StepsAccounted():
            for field in event.__match_args__:
                if field.endswith("_s") and field != "wall_s":
                    phase = (("phase", field.removesuffix("_s")),)
                    yield MetricValue("evenstep.phase_s", sum(getattr(event, field)), phase)
        case Rebalanced():
            yield MetricValue("evenstep.plans", 1)
        case _ if isinstance(event, _FAULTS):
            yield MetricValue("evenstep.faults", 1, (("kind", type(event).__name__),))


def _by_rank(name: str, values: Sequence[float], most_ranks: int) -> Iterator[MetricValue]:
    """Yield a value for each rank; of many ranks, quantiles and the largest values."""
    ranks: Sequence[int] = range(len(values))
    if len(values) > most_ranks:
        order = sorted(ranks, key=values.__getitem__)
        for quantile in _QUANTILES:
            at = order[round(quantile * (len(order) - 1))]
            yield MetricValue(
                f"evenstep.ranks.{name}", values[at], (("quantile", f"{quantile:g}"),)
            )
        ranks = order[-_WORST:]
    for rank in ranks:
        yield MetricValue(f"evenstep.rank.{name}", values[rank], (("rank", str(rank)),))


@final
class Newest:
    """What a run's metrics are now: for adapters that are asked, rather than told.

    Taking in an event keeps it and no more; metrics are made of it when they are asked for.
    """

    def __init__(self) -> None:
        self._events: dict[type[Event], Event] = {}
        self._totals: dict[tuple[str, Labels], float] = {}

    def take(self, event: Event) -> None:
        """Take in an event, from one thread."""
        self._events[type(event)] = event
        for name, value, labels in counts_of(event):
            key = name, labels
            self._totals[key] = self._totals.get(key, 0.0) + value

    def samples(self) -> Iterator[MetricValue]:
        """Yield all metrics, from any thread."""
        for event in self._events.copy().values():
            yield from gauges_of(event)
        for (name, labels), total in self._totals.copy().items():
            yield MetricValue(name, total, labels)


def check_has(argument: str, value: object, method: str, example: str) -> None:
    """Raise unless ``value`` is an object with ``method``.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, type) or not hasattr(value, method):
        raise invalid(argument, f"have `{method}`", repr(value), f"Give {example}.")
