"""A model that was not called through what ``prepare`` returned goes unnoticed otherwise."""

from __future__ import annotations

import warnings

from ..exceptions import EvenstepWarning

_BLIND_STEPS = 5  # a few, as warming-up steps and skipped ones are no mistake


class BlindWatch:
    """Warns once if steps go by whose gradient nobody weighted and whose time nobody took."""

    def __init__(self) -> None:
        self._num_blind = 0  # in a row

    def end_step(self, num_backwards: int) -> None:
        """Take note of a step and its backwards through balanced outputs."""
        self._num_blind = 0 if num_backwards else self._num_blind + 1
        if self._num_blind == _BLIND_STEPS:
            warnings.warn(
                f"No backward came through a balanced model in the last {_BLIND_STEPS} steps, so "
                f"their gradients were not weighted and nothing was measured. Call the model that "
                f"`prepare` returned, or with `weighting='loss'` use `balancer.weight(loss)`.",
                EvenstepWarning,
                stacklevel=2,
            )
