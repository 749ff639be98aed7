"""What a balancer has learnt, as a checkpoint holds it: plain values and tensors, by worker."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .._planner import Learnt, Planner, check_learnt, places
from ..events import EstimatesRestored
from ..exceptions import EvenstepWarning, invalid

_FORMAT = "evenstep-balancer-1"


class Estimates:
    """Speed estimates and peaks that follow host and device, not the rank.

    Attributes:
        workers: who each column is about: host and device, by the ranks of then.
        learnt: what a planner said; None where nothing was learnt.
        of_profile: whether a profile said it, before any step.
    """

    def __init__(
        self,
        workers: Sequence[str] = (),
        learnt: Learnt | None = None,
        *,
        of_profile: bool = False,
    ) -> None:
        self.workers = tuple(workers)
        self.learnt = learnt
        self.of_profile = of_profile

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as values that load with ``weights_only=True``.

        A policy whose state cannot be written so starts from the speeds alone, with a warning.
        """
        if self.learnt is None:
            return {"format": _FORMAT, "workers": [], "learnt": None}
        learnt = dict(self.learnt)
        try:
            written = {name: _as_tensors(value) for name, value in learnt.items()}
        except TypeError as error:
            warnings.warn(
                f"The state of the policy {learnt['policy']} is not saved: {error}. After a "
                f"restart it starts from the workers' speeds. Keep tuples and dicts (string "
                f"keys) of arrays and plain values in it.",
                EvenstepWarning,
                stacklevel=3,
            )
            learnt["policy"], learnt["policy_state"] = "", None
            written = {name: _as_tensors(value) for name, value in learnt.items()}
        return {"format": _FORMAT, "workers": list(self.workers), "learnt": written}

    @classmethod
    def read(cls, state: Any) -> Estimates:
        """Return what ``state_dict`` wrote.

        Raises:
            ValueError: it is something else, or broken.
        """
        try:
            return cls._read(state)
        except Exception as error:  # what is no state fails in every way there is
            raise invalid(
                "Balancer.load_state_dict(state=...)",
                "come from `Balancer.state_dict()`",
                reprlib.repr(state)[:80],
                "Load the part of the checkpoint that holds the balancer's state, or leave this "
                "call out: the speeds are measured again within a few steps.",
            ) from error

    @classmethod
    def _read(cls, state: Any) -> Estimates:
        if state["format"] != _FORMAT:
            raise ValueError
        workers, written = state["workers"], state["learnt"]
        if written is None:
            return cls()
        if not all(type(worker) is str for worker in workers):
            raise TypeError
        learnt = {name: _as_arrays(value) for name, value in written.items()}
        check_learnt(learnt, workers)
        return cls(workers, learnt)

    def apply(self, planner: Planner, workers: Sequence[str]) -> EstimatesRestored | None:
        """Have ``planner`` go on from them, for the workers of now; None if there are none."""
        if self.learnt is None:
            return None
        return planner.restore(self.learnt, places(self.workers, workers))


def _as_tensors(value: Any) -> Any:
    """Return ``value`` with tensors for arrays; types count exactly, as loading knows no others."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return tuple(_as_tensors(item) for item in value)
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _as_tensors(item) for key, item in value.items()}
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    raise TypeError(f"it holds {value!r}")


def _as_arrays(value: Any) -> Any:
    """Return ``value`` with arrays for tensors."""
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    if isinstance(value, tuple):
        return tuple(_as_arrays(item) for item in value)
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError
