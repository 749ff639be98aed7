"""One set of metrics, and hooks that give it to TensorBoard, Prometheus or OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from ._install import install_line
from .events import (
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
from .exceptions import invalid

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

__all__ = ["OpenTelemetry", "Prometheus", "TensorBoard"]

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


Value = tuple[str, float, Labels]
"""One value of a metric, under the name of the metric."""

GAUGES: Final = {
    "evenstep.run.world_size": ("{worker}", "Workers of the run."),
    "evenstep.run.global_batch_size": ("{sample}", "Samples of a step, all workers."),
    "evenstep.step.wall_s": ("s", "Time from one batch to the next on rank 0."),
    "evenstep.step.makespan_s": ("s", "Own computing of the slowest worker."),
    "evenstep.step.equal_split_s": ("s", "The same, had all had equal batches."),
    "evenstep.step.best_split_s": ("s", "The same, with the best split by the fit."),
    "evenstep.step.exchange_s": ("s", "Exchange of gradients by shares."),
    "evenstep.step.idle_share": ("1", "Part of all workers' computing time spent waiting."),
    "evenstep.step.waiting_share": ("1", "Part of all time spent waiting, as diagnosed."),
    "evenstep.rank.batch_size": ("{sample}", "Samples computed."),
    "evenstep.rank.compute_s": ("s", "Own forward and backward, without waiting."),
    "evenstep.rank.data_s": ("s", "Waiting for input."),
    "evenstep.rank.idle_s": ("s", "Waiting for the slowest rank's computing."),
    "evenstep.ranks.batch_size": ("{sample}", "Quantiles over many ranks."),
    "evenstep.ranks.compute_s": ("s", "Quantiles over many ranks."),
    "evenstep.ranks.data_s": ("s", "Quantiles over many ranks."),
    "evenstep.ranks.idle_s": ("s", "Quantiles over many ranks."),
}
"""Those that go up and down: each with its unit, as UCUM has it, and what it is, in a sentence."""

COUNTERS: Final = {
    "evenstep.steps": ("{step}", "Optimizer steps that were measured."),
    "evenstep.samples": ("{sample}", "Samples computed in them."),
    "evenstep.plans": ("{plan}", "Changes of the batch sizes."),
    "evenstep.phase_s": ("s", "Where the time of all ranks went, by phase."),
    "evenstep.faults": ("{fault}", "Faults that training went on after, or a lost worker."),
}
"""Those that only grow."""


def gauges_of(event: Event, *, most_ranks: int = MOST_RANKS) -> Iterator[Value]:
    """Yield what is true as of ``event``.

    Args:
        event: that happened.
        most_ranks: with more, quantiles stand for them, and the largest values.
    """
    match event:
        case RunStarted():
            yield "evenstep.run.world_size", event.world_size, ()
            yield "evenstep.run.global_batch_size", event.global_batch_size, ()
        case StepMeasured():
            for name in ("wall_s", "makespan_s", "equal_split_s", "best_split_s", "idle_share"):
                if (value := getattr(event, name)) is not None:
                    yield f"evenstep.step.{name}", value, ()
            for name in ("batch_size", "compute_s", "data_s", "idle_s"):
                yield from _by_rank(name, getattr(event, name), most_ranks)
        case ExchangeMeasured():
            yield "evenstep.step.exchange_s", event.exchange_s, ()
        case WaitingDiagnosed():
            yield "evenstep.step.waiting_share", event.waiting_share, ()


def counts_of(event: Event) -> Iterator[Value]:
    """Yield by how much ``event`` makes counters grow."""
    match event:
        case StepMeasured():
            yield "evenstep.steps", event.num_steps, ()
            yield "evenstep.samples", event.num_steps * sum(event.batch_size), ()
        case StepsAccounted():
            for field in event.__match_args__:
                if field.endswith("_s") and field != "wall_s":
                    phase = (("phase", field.removesuffix("_s")),)
                    yield "evenstep.phase_s", sum(getattr(event, field)), phase
        case Rebalanced():
            yield "evenstep.plans", 1, ()
        case _ if isinstance(event, _FAULTS):
            yield "evenstep.faults", 1, (("kind", type(event).__name__),)


def _by_rank(name: str, values: Sequence[float], most_ranks: int) -> Iterator[Value]:
    """Yield a value for each rank; of many ranks, quantiles and the largest values."""
    ranks: Sequence[int] = range(len(values))
    if len(values) > most_ranks:
        order = sorted(ranks, key=values.__getitem__)
        for quantile in _QUANTILES:
            at = order[round(quantile * (len(order) - 1))]
            yield f"evenstep.ranks.{name}", values[at], (("quantile", f"{quantile:g}"),)
        ranks = order[-_WORST:]
    for rank in ranks:
        yield f"evenstep.rank.{name}", values[rank], (("rank", str(rank)),)


class _Polled:
    """What a run's metrics are now: a hook that is polled for them.

    Taking in an event keeps it and no more; metrics are made of it when they are asked for.
    """

    def __init__(self) -> None:
        self._events: dict[type[Event], Event] = {}
        self._totals: dict[tuple[str, Labels], float] = {}

    def __call__(self, event: Event) -> None:
        """Take in an event, from one thread."""
        self._events[type(event)] = event
        for name, value, labels in counts_of(event):
            key = name, labels
            self._totals[key] = self._totals.get(key, 0.0) + value

    def _values(self) -> Iterator[Value]:
        """Yield all metrics, from any thread."""
        for event in self._events.copy().values():
            yield from gauges_of(event)
        for (name, labels), total in self._totals.copy().items():
            yield name, total, labels


def check_has(argument: str, value: object, method: str, example: str) -> None:
    """Raise unless ``value`` is an object with ``method``.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, type) or not hasattr(value, method):
        raise invalid(argument, f"have `{method}`", repr(value), f"Give {example}.")


@final
class OpenTelemetry(_Polled):
    """A hook whose metrics a meter of OpenTelemetry observes.

    Names are ``evenstep.step.wall_s``, ``evenstep.rank.compute_s`` with the attribute ``rank``, and
    so on; OpenTelemetry has no convention for training steps. Values are made when the SDK asks for
    them, at its own interval. A meter observes one run at a time.

    Usage:
        hooks = (OpenTelemetry(metrics.get_meter("training")),)

    Args:
        meter: a meter of your ``MeterProvider``, which says where metrics go.

    Raises:
        ValueError: it is no meter.
        ImportError: ``opentelemetry`` is missing.
    """

    def __init__(self, meter: Meter) -> None:  # noqa: D107  # the class says it
        try:
            from opentelemetry.metrics import Observation
        except ImportError as error:
            line = install_line("export")
            raise ImportError(f"`OpenTelemetry` needs opentelemetry-api: `{line}`.") from error
        example = '`opentelemetry.metrics.get_meter("training")`'
        check_has("OpenTelemetry(meter=...)", meter, "create_observable_gauge", example)
        super().__init__()
        self._observation = Observation
        for kinds, create in (
            (GAUGES, meter.create_observable_gauge),
            (COUNTERS, meter.create_observable_counter),
        ):
            for name, (unit, words) in kinds.items():
                create(name, callbacks=[partial(self._observe, name)], unit=unit, description=words)

    def _observe(self, name: str, options: CallbackOptions) -> Iterable[Observation]:
        found = self._values()
        return [self._observation(v, dict(labels)) for n, v, labels in found if n == name]


_UNITS = {"_s": "_seconds", "_share": "_ratio"}


@final
class Prometheus(_Polled):
    """A hook whose metrics a registry of ``prometheus_client`` shows.

    Names are those of the other adapters in Prometheus' way: ``evenstep_step_wall_seconds``,
    ``evenstep_rank_compute_seconds{rank="3"}``, ``evenstep_samples_total``. Values are made when
    they are scraped. A registry holds one run at a time.

    Usage:
        registry = CollectorRegistry()
        start_http_server(9400, registry=registry)
        hooks = (Prometheus(registry),)

    Args:
        registry: where this is registered. Start the server for it yourself, on rank 0.

    Raises:
        ValueError: it is no registry.
        ImportError: ``prometheus_client`` is missing.
    """

    def __init__(self, registry: CollectorRegistry) -> None:  # noqa: D107  # the class says it
        try:
            from prometheus_client import core
        except ImportError as error:
            line = install_line("export")
            raise ImportError(f"`Prometheus` needs prometheus-client: `{line}`.") from error
        example = "a `prometheus_client.CollectorRegistry()`"
        check_has("Prometheus(registry=...)", registry, "register", example)
        super().__init__()
        self._core = core
        registry.register(self)

    def describe(self) -> Iterable[Family]:
        """Return what there may be, for the registry to distinguish from others."""
        return self._families().values()

    def collect(self) -> Iterable[Family]:
        """Return what there is."""
        families = self._families()
        for name, value, labels in self._values():
            full = _plain(name) + "_total" * (name in COUNTERS)
            families[name].add_sample(full, dict(labels), value)
        return [family for family in families.values() if family.samples]

    def _families(self) -> dict[str, Family]:
        families: dict[str, Family] = {}
        for metrics, family in (
            (GAUGES, self._core.GaugeMetricFamily),
            (COUNTERS, self._core.CounterMetricFamily),
        ):
            families |= {name: family(_plain(name), words) for name, (_, words) in metrics.items()}
        return families


def _plain(name: str) -> str:
    """Return a metric's name in base units."""
    for unit, base in _UNITS.items():
        if name.endswith(unit):
            name = name.removesuffix(unit) + base
    return name.replace(".", "_")


_MOST_RANKS = 16


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorBoard:
    """A hook that writes the metrics of steps as scalars.

    Tags begin with ``evenstep/``; those of a rank end with its number. A scalar takes 20
    microseconds of Python's time, so all of them would slow training down. Only every tenth step is
    written, and with more than 16 ranks quantiles and the largest values. Counters are left out.

    Usage:
        hooks = (TensorBoard(SummaryWriter("runs/mine")),)

    Args:
        writer: such as ``torch.utils.tensorboard.SummaryWriter``. Close it yourself after the run.
        every: number of steps of which one is written, at least 1; 1 writes all.

    Raises:
        ValueError: ``writer`` cannot write scalars, or ``every`` is below 1.
    """

    writer: Any
    every: int = 10

    def __post_init__(self) -> None:
        example = "a `torch.utils.tensorboard.SummaryWriter`"
        check_has("TensorBoard(writer=...)", self.writer, "add_scalar", example)
        if self.every < 1:
            rule = "be at least 1"
            raise invalid("TensorBoard(every=...)", rule, self.every, "Use 1 for all steps.")

    def __call__(self, event: Event) -> None:
        """Write what the event says of its step."""
        step = getattr(event, "step", None)
        if step is None or (isinstance(event, StepMeasured) and step % self.every):
            return
        for name, value, labels in gauges_of(event, most_ranks=_MOST_RANKS):
            tag = "/".join([name.replace(".", "/", 1), *(value for _, value in labels)])
            self.writer.add_scalar(tag, value, step)
