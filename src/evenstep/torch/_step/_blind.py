"""Forwards and steps that are not weighted or measured, which would go unnoticed otherwise."""

from __future__ import annotations

from collections.abc import Callable

from ..._warning import warn

_BLIND_STEPS = 5  # a few, as warming-up steps and skipped ones are no mistake


class BlindWatch:
    """Warns once of steps that were trained on and whose gradient was neither weighted nor timed.

    They had forwards and no backward, or parameters have changed meanwhile: a model was not called
    through what ``prepare`` returned.

    Args:
        versions: a number that differs where parameters have changed.
    """

    def __init__(self, versions: Callable[[], int]) -> None:
        self._versions = versions
        # First step, newest used, version, whether that changed before: the optimizer may still
        # step for the newest backward while another thread fetches.
        self._since: tuple[int, int, int, bool] | None = None
        self._has_warned = False
        self._has_warned_of_forward = False

    def handed_out(self, step: int, newest_used: int, num_forwards: Callable[[], int]) -> None:
        """Take note of a step that is not the next one after the newest used.

        Its batch may be fetched long before it is used.

        Args:
            step: the one handed out.
            newest_used: the newest one with a backward through balanced outputs.
            num_forwards: how many steps since then had a forward.
        """
        if self._has_warned:
            return
        if self._since is None or self._since[1] != newest_used:
            self._since = step, newest_used, self._versions(), False
        else:
            first, _, before, has_stepped = self._since
            version = self._versions()
            if version != before and not has_stepped:
                self._since = first, newest_used, version, True
            elif step - first >= _BLIND_STEPS:
                self._has_warned = version != before or num_forwards() >= _BLIND_STEPS
        if self._has_warned:
            warn(
                f"No backward came through a balanced model in the last {_BLIND_STEPS} steps, so "
                f"their gradients were not weighted and nothing was measured. Call the model that "
                f"`prepare` returned by `model(x)`, not `model.module(x)`, whose gradients nothing "
                f"averages, and not `model.forward(x)`. With `weighting='loss'`, use "
                f"`balancer.weight(loss)` as well."
            )

    def outside(self) -> None:
        """Warn once of a forward in training that belongs to no batch that was handed out."""
        if self._has_warned_of_forward:
            return
        self._has_warned_of_forward = True
        warn(
            "The inputs of a forward in training are not from any batch of a balanced loader. Its "
            "gradient has the same weight on every rank, which is right only if the ranks' batches "
            "have one size. If the inputs are a copy of a batch, name the batch: "
            "`with balancer.step(batch): ...`, with `batch` as the loader handed it out."
        )
