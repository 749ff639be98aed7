"""Metrics for whatever OpenTelemetry's SDK sends them to."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, final

from .._install import install_line
from ..events import Event
from ._metrics import COUNTERS, GAUGES, Newest, check_has

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation


@final
class OpenTelemetry:
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

    def __init__(self, meter: Meter) -> None:
        try:
            from opentelemetry.metrics import Observation
        except ImportError as error:
            line = install_line("export")
            raise ImportError(f"`OpenTelemetry` needs opentelemetry-api: `{line}`.") from error
        example = '`opentelemetry.metrics.get_meter("training")`'
        check_has("OpenTelemetry(meter=...)", meter, "create_observable_gauge", example)
        self._observation = Observation
        self._newest = Newest()
        for kinds, create in (
            (GAUGES, meter.create_observable_gauge),
            (COUNTERS, meter.create_observable_counter),
        ):
            for name, unit, words in kinds:
                create(name, callbacks=[partial(self._observe, name)], unit=unit, description=words)

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        self._newest.take(event)

    def _observe(self, name: str, options: CallbackOptions) -> Iterable[Observation]:
        samples = self._newest.samples()
        return [self._observation(v, dict(labels)) for n, v, labels in samples if n == name]
