"""Exchanges over simulated links, by the planners that train."""

from ._played import follow_links as follow_links
from ._played import known_links as known_links
from ._played import run_over_links as run_over_links
from ._shared_links import SharedLinksComm as SharedLinksComm

__all__ = ["SharedLinksComm", "follow_links", "known_links", "run_over_links"]
