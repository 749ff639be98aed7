"""Hooks that carry the events of a run to where people already look."""

from ._metrics import OpenTelemetry as OpenTelemetry
from ._metrics import Prometheus as Prometheus
from ._metrics import TensorBoard as TensorBoard

__all__ = [
    "OpenTelemetry",
    "Prometheus",
    "TensorBoard",
]
