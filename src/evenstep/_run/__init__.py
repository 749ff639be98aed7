"""What a run is on one rank, whatever the framework: settings, record, exchange, estimates."""

from ._machine_reader import ProcessReader as ProcessReader

__all__ = ["ProcessReader"]
