"""A model that was not called through what ``prepare`` returned goes unnoticed otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from ..exceptions import EvenstepWarning

_BLIND_STEPS = 5  # a few, as warming-up steps and skipped ones are no mistake


class BlindWatch:
    """Warns once of steps that were trained on and whose gradient was neither weighted nor timed.

    They had forwards and no backward, or parameters have changed meanwhile.

    Args:
        versions: a number that differs where parameters have changed.
    """

    def __init__(self, versions: Callable[[], int]) -> None:
        self._versions = versions
        self._since: tuple[int, int, int] | None = None  # first step, newest used, version
        self._has_warned = False

    def handed_out(self, step: int, newest_used: int, num_forwards: Callable[[], int]) -> None:
        """Take note of a step, of which the batch may be fetched long before it is used.

        Args:
            step: the one handed out.
            newest_used: the newest one with a backward through balanced outputs.
            num_forwards: how many steps since then had a forward.
        """
        if self._has_warned or newest_used >= step - 1:
            self._since = None
            return
        if self._since is None or self._since[1] != newest_used:
            self._since = step, newest_used, self._versions()
        elif step - self._since[0] >= _BLIND_STEPS:
            has_trained = self._versions() != self._since[2]
            self._has_warned = has_trained or num_forwards() >= _BLIND_STEPS
        if self._has_warned:
            warnings.warn(
                f"No backward came through a balanced model in the last {_BLIND_STEPS} steps, so "
                f"their gradients were not weighted and nothing was measured. Call the model that "
                f"`prepare` returned, or with `weighting='loss'` use `balancer.weight(loss)`.",
                EvenstepWarning,
                stacklevel=2,
            )
