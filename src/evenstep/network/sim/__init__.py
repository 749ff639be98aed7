"""Exchanges over simulated links, by the planners that train."""

from ._played import follow_links, known_links, run_over_links
from ._shared_links import SharedLinksComm

__all__ = ["SharedLinksComm", "follow_links", "known_links", "run_over_links"]
