"""Hooks that carry the events of a run to where people already look."""

from ._open_telemetry import OpenTelemetry as OpenTelemetry
from ._prometheus import Prometheus as Prometheus
from ._tensorboard import TensorBoard as TensorBoard

__all__ = [
    "OpenTelemetry",
    "Prometheus",
    "TensorBoard",
]
