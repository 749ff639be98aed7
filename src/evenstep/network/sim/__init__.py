"""Exchanges over simulated links, by the planners that train."""

from ._shared_links import SharedLinksComm, follow_links, known_links, run_over_links

__all__ = ["SharedLinksComm", "follow_links", "known_links", "run_over_links"]
