"""Exchanges over simulated links, by the planners that train."""

from ._shared_links import follow_links, known_links, run_over_links, step_over_links_s

__all__ = ["follow_links", "known_links", "run_over_links", "step_over_links_s"]
