"""Metrics for Prometheus to scrape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

from .._install import install_line
from ..events import Event
from ._metrics import COUNTERS, GAUGES, Newest, check_has

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

_UNITS = {"_s": "_seconds", "_share": "_ratio"}


@final
class Prometheus:
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

    def __init__(self, registry: CollectorRegistry) -> None:
        try:
            from prometheus_client import core
        except ImportError as error:
            line = install_line("export")
            raise ImportError(f"`Prometheus` needs prometheus-client: `{line}`.") from error
        example = "a `prometheus_client.CollectorRegistry()`"
        check_has("Prometheus(registry=...)", registry, "register", example)
        self._core = core
        self._newest = Newest()
        registry.register(self)

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        self._newest.take(event)

    def describe(self) -> Iterable[Family]:
        """Return what there may be, for the registry to tell apart from others."""
        return self._families().values()

    def collect(self) -> Iterable[Family]:
        """Return what there is."""
        families = self._families()
        for name, value, labels in self._newest.samples():
            families[name].add_sample(_full(name, families[name].type), dict(labels), value)
        return [family for family in families.values() if family.samples]

    def _families(self) -> dict[str, Family]:
        families: dict[str, Family] = {
            metric.name: self._core.GaugeMetricFamily(_plain(metric.name), metric.help)
            for metric in GAUGES
        }
        for metric in COUNTERS:
            name = _plain(metric.name)
            families[metric.name] = self._core.CounterMetricFamily(name, metric.help)
        return families


def _plain(name: str) -> str:
    """Return a metric's name in base units."""
    for unit, base in _UNITS.items():
        if name.endswith(unit):
            name = name.removesuffix(unit) + base
    return name.replace(".", "_")


def _full(name: str, kind: str) -> str:
    return _plain(name) + "_total" * (kind == "counter")
