"""What the loader and the hooks hold before a run is open, and pass everything on to after."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .._exchange._exchange import Exchange
from .._exchange._mailbox import Mailbox
from ..control import Plan
from ..exceptions import RanksDivergedError, WorkerLostError, invalid
from ..sync import Claim
from ._checkpoint._estimates import Estimates
from ._clock import StepMeter
from ._data._protocols import MicroBatch, StepStart
from ._model._weighting import Use
from ._run import Run

_OF_COLLECTIVES = ("gloo/", "NCCL", "Connection closed by peer")  # in errors of torch's backends
_VERDICT_S = 2.0


class OpenRun(Protocol):
    """Opens the run."""

    def __call__(self, listeners: list[Callable[[Plan], None]], *, cuts: bool) -> Run:
        """Open it, in the same step on all ranks."""


class RunLink:
    """A plan source and a step listener that opens the run at its first epoch.

    Args:
        open_run: opens it.

    Attributes:
        least_workers: how many have to be left if an unhelpful one is dropped; None to drop none.
        exchange: with the other ranks, from ``prepare`` on; None before.
    """

    def __init__(self, open_run: OpenRun) -> None:
        self._open_run = open_run
        self._listeners: list[Callable[[Plan], None]] = []
        self._run: Run | None = None
        self._cuts: bool | None = None
        self._closed = False
        self._estimates = Estimates()
        self.least_workers: int | None = None
        self.exchange: Exchange | None = None

    def begin_epoch(self, *, cuts: bool) -> None:
        """Open the run, if it is not yet.

        Args:
            cuts: whether the loop takes micro-batches.

        Raises:
            RuntimeError: the run was opened with the other kind of loop.
        """
        self._check_open()
        if self._run is None:
            self._cuts = cuts
            self._run = self._open_run(self._listeners, cuts=cuts)
        elif cuts != self._cuts:
            raise RuntimeError(
                "This run mixes `for batch in loader` with `loader.steps()`. Memory bounds the "
                "whole batch in one and a micro-batch in the other: use one kind of loop."
            )
        self._run.exchange.num_loops += 1

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` told of every plan once the run is open."""
        self._listeners.append(listener)

    def plan(self) -> Plan | None:
        """Return the plan of the step under way, or of the last one; None before the first."""
        return None if self._run is None else self._run.conductor.plan

    def at(self, step: int) -> Plan:
        """Return the plan of ``step``: the plan point."""
        return self._opened().conductor.at(step)

    @property
    def mailbox(self) -> Mailbox:
        """What ranks tell each other outside of collectives, once the run is open."""
        return self._opened().exchange.mailbox

    def begin_step(self, start: StepStart) -> None:
        """Pass the step on to the conductor."""
        self._opened().conductor.begin_step(start)

    def claim(
        self, step: int, *, speed: float | None = None, own: bool = False
    ) -> tuple[Claim, ...]:
        """Pass a claim on to the exchange."""
        self._check_open()
        return self._opened().exchange.claims.claim(step, speed=speed, own=own)

    def begin_claim(self) -> None:
        """Pass the claim on to the conductor."""
        self._opened().conductor.begin_claim()

    def end_claim(self, num_samples: int) -> None:
        """Pass what it gave on to the conductor."""
        self._opened().conductor.end_claim(num_samples)

    def begin_forward(self, step: int, part: MicroBatch, *, is_last: bool) -> None:
        """Pass the batch on to the conductor."""
        self._opened().conductor.begin_forward(step, part, is_last=is_last)

    def num_ahead(self) -> int:
        """Return how many steps the loop has fetched before it used those at hand."""
        return 0 if self._run is None else self._run.conductor.num_ahead

    def found_limit(self, limit: int) -> None:
        """Pass on what one forward may have to the conductor."""
        self._opened().conductor.found_limit(limit)

    def ran_out_of_memory(self, limit: int, *, num_samples: int, again: bool) -> None:
        """Pass a forward that did not fit on to the conductor."""
        self._opened().conductor.ran_out_of_memory(limit, num_samples=num_samples, again=again)

    def came_to_end(self) -> None:
        """Pass the natural end of the loop on to the conductor."""
        if self._run is not None:
            self._run.conductor.came_to_end()

    def end_epoch(self) -> None:
        """Pass the end of the loop on to the conductor."""
        if self._run is not None:
            self._run.conductor.end_epoch()

    def begin_use(
        self, model: int, tensors: list[torch.Tensor], *, reduces: bool | None
    ) -> Use | None:
        """Return what the forward under way keeps for its backward; None outside of a step."""
        if self._run is None:
            return None
        return self._run.conductor.begin_use(model, tensors, reduces=reduces)

    def outside(self) -> None:
        """Pass a forward in training without a batch on to the conductor."""
        if self._run is not None:
            self._run.conductor.outside()

    def end_use(self) -> None:
        """Pass the end of the forward on to the conductor."""
        if self._run is not None:
            self._run.conductor.end_use()

    def use_of_loss(self) -> Use | None:
        """Return what the newest forward keeps for its backward; None outside of a step."""
        return None if self._run is None else self._run.conductor.use_of_loss()

    def named(self, batch: Any) -> AbstractContextManager[None]:
        """Return a context in which forwards belong to ``batch``.

        Raises:
            RuntimeError: no batch was handed out yet.
        """
        if self._run is None:
            raise RuntimeError("No batch was handed out yet: loop over what `prepare` returned.")
        return self._run.conductor.named(batch)

    def meter(self) -> StepMeter | None:
        """Return the meter of the step under way, if there is one."""
        if self._run is None or not self._run.conductor.in_step:
            return None
        return self._run.conductor.meter

    def backward_begins(self) -> None:
        """Pass the beginning of a backward on to the conductor."""
        if self._run is not None:
            self._run.conductor.backward_begins()

    def backward_done(self, uses: list[Any]) -> None:
        """Pass the end of a backward on to the conductor."""
        if self._run is not None:
            self._run.conductor.backward_done(uses)

    def reduced(self) -> None:
        """Pass the end of a backward's collectives on to the conductor."""
        if self._run is not None:
            self._run.conductor.reduced()

    def collective(self, *, entered: bool) -> None:
        """Note that the main thread enters or leaves a collective outside of a backward."""
        if self._run is not None and entered:
            self._run.exchange.enter_collective()
        elif self._run is not None:
            self._run.exchange.leave_collective()

    def report_now(self) -> None:
        """Pass on that a collective of the balancer's own comes before the plan point."""
        if self._run is not None:
            self._run.conductor.report_now()

    @property
    def num_samples(self) -> int | None:
        """Samples of this rank in the step under way; None outside of one."""
        return None if self._run is None else self._run.conductor.num_samples

    @property
    def num_samples_seen(self) -> tuple[int, int]:
        """Samples that this rank trained on: in the run, and in its newest step."""
        return (0, 0) if self._run is None else self._run.conductor.num_samples_seen

    @property
    def num_units(self) -> float | None:
        """Units of this rank in the step under way, samples or others; None outside of one."""
        return None if self._run is None else self._run.conductor.num_units

    def ask_to_stop(self) -> bool:
        """Have all ranks agree to stop; return whether there is a run in which they can.

        May be called from a signal handler.
        """
        if self._run is None or self._closed:
            return False
        self._run.exchange.stop.ask()
        return True

    @property
    def stopping(self) -> bool:
        """Whether all ranks know, as of the step under way, that one of them asked to stop."""
        return self._run is not None and self._run.conductor.stopping

    @property
    def is_leaving(self) -> bool | None:
        """Whether this rank leaves the run with that stop; None if nobody does."""
        if self._run is None or not self.stopping or self._run.exchange.stop.leaving is None:
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

    def _opened(self) -> Run:
        assert self._run is not None, "begin_epoch comes first"
        return self._run
