"""Who sums what: what each rank saw of an exchange to rank 0, and the next plan back."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, replace

from .._exchange._internal import fault_in_words, log_fault
from .._exchange._message_kinds import Message, SharesReply, SharesReport
from ..events import Hook, SharesPlanned
from ._following._link_tracker import ObservedExchange, Transfers
from ._following._share_planner import SharePlanner, SharesInForce

_KEPT_STEPS = 8  # ranks are at most a step apart; who noted nothing by then never will


class Shares:
    """One rank's side of the plans of shares: noted with the step after, decided between steps.

    A step's exchange is over when its report is long sent, so what was seen of it travels with the
    next one. Rank 0 decides while no rank waits, and numbers the plan's first step so that no rank
    can be past it: the answer that opens this step is sent after the plan.

    Servers take no part in steps: what each saw of one comes by itself, once the next begins. A
    step that not all have noted by then is left out, as after a restart within it.

    Args:
        world_size: number of workers.
        num_servers: ranks after them that only sum.
        send_all: on rank 0, sends a message to all other workers.
        lag: steps by which a plan of sizes trails its measurement.
        emit: takes every event, on rank 0.
    """

    kinds = (SharesReport, SharesReply)

    def __init__(
        self,
        world_size: int,
        *,
        send_all: Callable[[Message], None],
        lag: int,
        emit: Hook,
        num_servers: int = 0,
    ) -> None:
        self._world_size = world_size
        self._num_servers = num_servers
        self._send_all = send_all
        self._lag = lag
        self._emit = emit
        self._planner: SharePlanner | None = None
        self._thread: ThreadPoolExecutor | None = None  # of rank 0's decisions
        self._lock = threading.Lock()
        self._plans: list[SharesInForce] = []
        self._answered = -2  # newest step that was answered, or is about to be
        self._noted: SharesReport | None = None
        self._arrived: defaultdict[int, dict[int, SharesReport]] = defaultdict(
            dict
        )  # on rank 0, by step
        self._shown = -1  # newest step that was shown to the planner

    def lead(self, planner: SharePlanner) -> None:
        """On rank 0: plan with ``planner``, on a thread of its own."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evenstep-shares")
        self._planner, plan = planner, planner.plan
        self._emit(SharesPlanned(0, plan.epoch, plan.parts, plan.predicted_s, None, plan.reason))

    def close(self) -> None:
        """Decide no more."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def note(self, seen: SharesReport) -> None:
        """Keep what this rank saw until its next report."""
        self._noted = seen

    def along(self) -> Sequence[Message]:
        """Return what to send along with a report: what was seen of the step before."""
        seen, self._noted = self._noted, None
        return () if seen is None else (seen,)

    def received(self, peer: int, message: Message) -> None:
        """Take in a plan, or on rank 0 what a rank saw of a step."""
        match message:
            case SharesReply(plan):
                with self._lock:
                    self._plans.append(SharesInForce(*plan))
            case SharesReport():
                self._arrive(peer, message)

    def answers(self, index: int) -> None:
        """On rank 0: note that step ``index`` is about to be answered."""
        with self._lock:
            self._answered = index

    def at(self, step: int) -> SharesInForce | None:
        """Return the plan of ``step``, once its plan point is reached; None before the first."""
        with self._lock:
            begun = [plan for plan in self._plans if plan.first_step <= step]
            if begun:
                self._plans = self._plans[self._plans.index(begun[-1]) :]
            return begun[-1] if begun else None

    def _arrive(self, rank: int, seen: SharesReport) -> None:
        thread = self._thread
        with self._lock:
            if thread is None or seen.step <= self._shown:
                return
            self._arrived[seen.step][rank] = seen
            arrived = self._arrived[seen.step]
            complete = self._is_complete(arrived)
            self._shown = seen.step if complete else self._shown
            oldest = max(self._shown + 1, max(self._arrived) - _KEPT_STEPS)
            for step in [step for step in self._arrived if step < oldest]:
                del self._arrived[step]  # of older ones, a rank saw nothing
        if complete:
            with suppress(RuntimeError):  # closed meanwhile
                thread.submit(self._decide, [arrived[one] for one in sorted(arrived)])

    def _is_complete(self, arrived: Mapping[int, SharesReport]) -> bool:
        """Return whether all that had a part in an exchange have noted it.

        A plain all-reduce is the workers' own.
        """
        workers = [seen for rank, seen in arrived.items() if rank < self._world_size]
        shared = any(seen.rows is not None for seen in workers)
        servers = self._num_servers if shared else 0
        return len(workers) == self._world_size and len(arrived) - len(workers) >= servers

    def _decide(self, seen: Sequence[SharesReport]) -> None:
        """Show the planner an exchange; where anything fails, continue without it."""
        if self._planner is None:
            return
        try:
            self._show(self._planner, seen)
        except Exception as error:  # a user's policy is the planner's own matter
            self._give_up(self._planner, seen[0].step, error)

    def _show(self, planner: SharePlanner, seen: Sequence[SharesReport]) -> None:
        """Show the planner an exchange, and send all ranks what it says."""
        before, step = planner.plan, seen[0].step
        if len({one.plan_epoch for one in seen}) > 1:
            return  # a step that some rank began anew
        transfers = None
        if any(one.rows is not None for one in seen):
            rows = [row for one in seen for row in one.rows or ()]
            transfers = Transfers.from_rows(self._world_size + self._num_servers, rows)
            lasted_s = max(one.lasted_s for one in seen)
            transfers = transfers.lasting(lasted_s) if lasted_s > 0 else transfers
        workers = [one for one in seen if math.isfinite(one.waited_s)]
        exchange = ObservedExchange(
            seen[0].plan_epoch,
            # From a common start: who waited least may have had its sums before all others.
            max(one.spent_s + one.waited_s for one in workers)
            - max(one.spent_s for one in workers),
            transfers,
        )
        with self._lock:
            next_step = self._answered + 2 + self._lag
        events = planner.observe(step, exchange, next_step=next_step)
        if planner.plan is not before:
            self._announce(planner.plan)
        for event in events:
            self._emit(event)

    def _give_up(self, planner: SharePlanner, step: int, error: Exception) -> None:
        """Have gradients summed by plain all-reduce for good: what failed cannot be trusted."""
        self._planner = None
        log_fault(step, error, "Gradients are summed by plain all-reduce for the rest of the run.")
        reason = f"plain all-reduce for the rest of the run: {fault_in_words(error)}"
        plan = self._announce(SharesInForce(planner.plan.epoch + 1, step, None, None, reason))
        self._emit(SharesPlanned(plan.first_step, plan.epoch, None, None, None, reason))

    def _announce(self, plan: SharesInForce) -> SharesInForce:
        """Send all ranks a plan; return it with its first step."""
        with self._lock:  # no step is answered meanwhile
            first_step = max(plan.first_step, self._answered + 2 + self._lag)
            plan = replace(plan, first_step=first_step)
            self._send_all(SharesReply(astuple(plan)))
            self._plans.append(plan)
        return plan
