"""A model that was not called through what ``prepare`` returned goes unnoticed otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ..exceptions import EvenstepWarning

_BLIND_STEPS = 5  # a few, as warming-up steps and skipped ones are no mistake


class BlindWatch:
    """Warns once if parameters change over steps whose gradient nobody weighted or timed.

    Args:
        versions: a number that differs where parameters have changed.
    """

    def __init__(self, versions: Callable[[], int]) -> None:
        self._versions = versions
        self._since: tuple[int, int, int] | None = None  # first step, newest used, version
        self._has_warned = False

    def handed_out(self, step: int, newest_used: int) -> None:
        """Take note of a step, and of the newest one with a backward through balanced outputs."""
        if self._has_warned or newest_used >= step - 1:
            self._since = None
            return
        if self._since is None or self._since[1] != newest_used:
            self._since = step, newest_used, self._versions()
        elif step - self._since[0] >= _BLIND_STEPS and self._versions() != self._since[2]:
            self._has_warned = True
            warnings.warn(
                f"Parameters changed over the last {_BLIND_STEPS} steps, and no backward came "
                f"through a balanced model: gradients were not weighted and nothing was measured. "
                f"Call the model that `prepare` returned, or with `weighting='loss'` use "
                f"`balancer.weight(loss)`.",
                EvenstepWarning,
                stacklevel=2,
            )
