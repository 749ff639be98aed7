"""One rank's part in a run: what loaders, hooks and the balancer hold from the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .._exchange._exchange import Exchange
from .._exchange._mailbox import Mailbox
from .._run._estimates import Estimates
from ..exceptions import RanksDivergedError, WorkerLostError, invalid
from ..planner import Plan
from ._conductor import StepConductor
from ._no_steps import NoSteps
from ._torch_run import TorchRun

_OF_COLLECTIVES = ("gloo/", "NCCL", "Connection closed by peer")  # in errors of torch's backends
_VERDICT_S = 2.0


class OpenRun(Protocol):
    """Opens the run."""

    def __call__(self, listeners: list[Callable[[Plan], None]], *, cuts: bool) -> TorchRun:
        """Open it, in the same step on all ranks."""


class Session:
    """Opens the run at the first loop, and has the steps that loaders and hooks speak to.

    Args:
        open_run: opens it.

    Attributes:
        steps: of the run; before it is open there are none.
        least_workers: how many have to be left if an unhelpful one is dropped; None to drop none.
        exchange: with the other ranks, from ``prepare`` on; None before.
    """

    def __init__(self, open_run: OpenRun) -> None:
        self._open_run = open_run
        self._listeners: list[Callable[[Plan], None]] = []
        self._run: TorchRun | None = None
        self._cuts: bool | None = None
        self._closed = False
        self._estimates = Estimates()
        self.steps: StepConductor | NoSteps = NoSteps()
        self.least_workers: int | None = None
        self.exchange: Exchange | None = None

    def begin_epoch(self, *, cuts: bool) -> StepConductor:
        """Return the steps of the run, and open it if it is not yet.

        Args:
            cuts: whether the loop takes micro-batches.

        Raises:
            RuntimeError: the run was opened with the other kind of loop.
        """
        self._check_open()
        if self._run is None:
            self._cuts = cuts
            self._run = self._open_run(self._listeners, cuts=cuts)
            self.steps = self._run.conductor
        elif cuts != self._cuts:
            raise RuntimeError(
                "This run mixes `for batch in loader` with `loader.steps()`. Memory bounds the "
                "whole batch in one and a micro-batch in the other: use one kind of loop."
            )
        self._run.exchange.num_loops += 1
        return self._run.conductor

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` told of every plan once the run is open."""
        self._listeners.append(listener)

    @property
    def mailbox(self) -> Mailbox:
        """What ranks tell each other outside of collectives, once the run is open."""
        assert self.exchange is not None, "`prepare` comes first"
        return self.exchange.mailbox

    def ask_to_stop(self) -> bool:
        """Have all ranks agree to stop; return whether there is a run in which they can.

        May be called from a signal handler.
        """
        if self._run is None or self._closed:
            return False
        self._run.exchange.stop.ask()
        return True

    @property
    def is_leaving(self) -> bool | None:
        """Whether this rank leaves the run with that stop; None if no rank does."""
        if self._run is None or not self.steps.stopping or self._run.exchange.stop.leaving is None:
            return None
        return self._run.exchange.stop.leaving == self._run.rank

    @property
    def estimates(self) -> Estimates:
        """What is known about the workers: from an earlier run until this one is open."""
        return self._estimates if self._run is None else self._run.estimates()

    def restore(self, estimates: Estimates) -> None:
        """Have the run begin with what an earlier one has learnt.

        Raises:
            ValueError: it has begun.
        """
        if self._run is not None:
            raise invalid(
                "Balancer.load_state_dict(...)",
                "come before the first loop over the loader",
                "a run that is under way",
                "Load into a new `Balancer`.",
            )
        self._estimates = estimates

    def loss_behind(self, error: BaseException | None) -> RuntimeError | None:
        """Return the loss of a worker that is behind a collective's error, if that is one.

        A peer that dies in the middle of a collective breaks it for the others, with an error
        that names a port. Who it was is known a moment later. Whatever ``error`` is, it ends this
        script, which the goodbye will tell.
        """
        if self.exchange is None:
            return None
        if error is None:  # after the last step, nothing else came by to say so
            if self._run is not None:
                self._run.conductor.close()
                self.exchange.hear_out(limit_s=_VERDICT_S)
            return self.exchange.diverged
        self.exchange.script_failed(error)
        if isinstance(error, KeyboardInterrupt):
            return self.exchange.interrupted_by
        ended = isinstance(error, WorkerLostError | RanksDivergedError)
        if ended or not isinstance(error, RuntimeError):
            return None
        broke = any(word in str(error) for word in _OF_COLLECTIVES)
        return self.exchange.verdict(within_s=_VERDICT_S, in_collective=broke)

    def close(self) -> None:
        """Close the run, if it is open, for good."""
        self._closed = True
        if self._run is not None:
            self._run.close()
        elif self.exchange is not None:
            self.exchange.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(
                "The balancer was closed, and with it this loader. Loop inside the `with` block, "
                "or before `close()`; a new `Balancer` starts a new run."
            )
