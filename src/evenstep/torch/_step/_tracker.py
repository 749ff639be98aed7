"""One rank's way through a step: hand-out, weight, own time, report, next plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import monotonic, perf_counter
from typing import Any

import torch

from ..._diagnosis import Phase
from ..._exchange._exchange import Exchange
from ..._exchange._lost_ranks import LostRanks
from ..._planner import Plan
from ..._run._machine_reader import MachineReader
from ..._run._step_state import LoopPosition, StepObserver, StepState, called_by
from ..._warning import OneWarning
from ...claims._step_claims import Claim
from .._data._protocols import MicroBatch, StepStart
from .._exchange._side_group import PeerGroup
from .._options import MemoryReader
from ._batch_checks import UntrackedSteps
from ._marks import MOST_NOTES, Looks, Recorder
from ._reductions import ForwardRecord, OutputWatch, ReductionLedger, Weights
from ._reporter import CompileWatch, Reporter
from ._tickets import Match, Ticket, Tickets

_NUM_PEEKED = 4  # first batches of a loop, before it shows whether it fetches ahead
_MOST_OPEN = 128  # steps that were handed out and may still get micro-batches


class StepTracker:
    """Stands between the loader, the model's hooks and the exchange.

    The loader announces steps and batches, and asks for plans; the hooks ask to which batch a
    forward belongs and announce the end of every backward; the exchange is given one report a
    step, as early as it can be complete. The loader may be read by another thread than the one
    that trains, ahead of it: the step under way is that of the newest forward.

    A step's last backward is recognised by the number of backwards that each batch of the step
    before had. Where that fails, the report is late but complete: when the next step begins.

    Hooks and loaders hold it from ``prepare`` on. Until the run opens no batch is handed out.

    Attributes:
        meter: measures own compute time; once the run is open.
        looks: at what a script may do wrong.
        num_steps: with a backward, that are over.
        plan: of the newest step that was handed out; None before the first.
        plan_in_use: of the newest step with a backward, so the same on all ranks; None before.
        backward_begins: notes that a backward begins; once the run is open.
    """

    recorder: Recorder
    backward_begins: Callable[[], None]
    _exchange: Exchange
    _lost_ranks: LostRanks
    _watch: CompileWatch
    _reporter: Reporter
    _weights: Weights
    _outputs: OutputWatch
    _blind: UntrackedSteps

    def __init__(self) -> None:
        self._is_open = self._is_closed = False
        self._tickets = Tickets(identifies=False)
        self._books = ReductionLedger()
        self._named: Match | None = None  # to which batch the user says that forwards belong
        self._newest_use: ForwardRecord | None = None
        self._thread_id: int | None = None  # of the training thread, from the first forward on
        self._steps: dict[int, StepState] = {}  # that were handed out, by number
        self._step: StepState | None = None
        self._backwards_per_forward = 0  # 0: not known, or not the same for every forward
        self._handed_out_s: float | None = None
        self._loop = LoopPosition()
        self.looks = Looks()
        self.num_steps = 0
        self._warn_of_forward = OneWarning()
        self._seen = 0, 0  # samples of this rank: in the finished steps, and in the last of them
        self.plan: Plan | None = None
        self.plan_in_use: Plan | None = None

    def open(
        self,
        exchange: Exchange,
        recorder: Recorder,
        watch: CompileWatch,
        *,
        world_size: int,
        loss_reduction: str = "mean",
        exact: bool = False,
        cuts: bool = False,
        identifies_samples: bool = False,
        at_random: bool | None = None,
        memory: MemoryReader | None = None,
        machine: MachineReader | None = None,
        versions: Callable[[], int] = lambda: 0,
        peers: PeerGroup | None = None,
        observers: Sequence[StepObserver] = (),
    ) -> None:
        """Have the run's steps begin.

        Args:
            exchange: carries reports and plans.
            recorder: notes where the time of a step goes.
            watch: notices what is compiled in a step.
            world_size: number of workers.
            loss_reduction: ``"mean"`` or ``"sum"``, what the user's loss does over samples.
            exact: whether to wait for the device at the plan point, so that nothing is late.
            cuts: whether the loop takes micro-batches, which are used in the order they come in.
            identifies_samples: whether forwards need to know their samples, with one rank as well.
            at_random: whether samples are drawn so, for the check of the loss; None is no check.
            memory: read at each step beside the time; None reads none.
            machine: likewise, what this rank can have of its machine.
            versions: shows by a number whether parameters have changed.
            peers: ranks that get the very same batches; None if there are none.
            observers: are notified of how every step goes, besides ``watch``.
        """
        self._exchange, self.recorder = exchange, recorder
        recorder.looks = self.looks
        self._lost_ranks, self._watch = exchange.lost_ranks, watch
        self.backward_begins = partial(recorder.close_gap, Phase.BACKWARD)
        self._reporter = Reporter(exchange, recorder, watch, memory, machine, exact=exact)
        self._weights = Weights(exchange, recorder, world_size, loss_reduction)
        self._cuts = cuts
        self._is_alone = world_size == 1
        identifies = identifies_samples or not self._is_alone
        self._tickets = Tickets(identifies=identifies, counts_rows=loss_reduction == "mean")
        self._outputs = OutputWatch(exchange, compares=at_random is not None and not self._is_alone)
        if at_random is not None:
            exchange.scales.open(loss_reduction, at_random=at_random)
        self._blind = UntrackedSteps(versions)
        self._peers = () if peers is None else (peers,)
        called = partial(called_by, (watch, *observers))
        self._at_begin, self._at_end = called("begin_step"), called("end_step")
        self._at_first_forward, self._at_forward = called("first_forward"), called("begin_forward")
        if watch.on_cuda:
            self._at_forward += (watch.tunes,)
        self._at_backward_done, self._at_reduced = called("backward_done"), called("reduced")
        self._checks = called("check_over")
        self._is_open = True

    def at(self, step: int) -> Plan:
        """Return the plan of ``step``: the plan point. Finish the step under way if it is used."""
        trains = self._thread_id is None or self._thread_id == threading.get_ident()
        if trains:
            if self._step is not None and self._step.num_backwards:
                if not self._step.reported:
                    self._check_over()
                self._finish(self._step)
            self.recorder.begin_fetch(in_step=self._step is not None)
        plan = self._exchange.at(step, trains=trains, may_look_ahead=True)
        for peers in self._peers:
            plan = peers.agree(plan, self._exchange)
        if trains:
            recorder = self.recorder  # what follows is input
            recorder.note((partial(recorder.meter.timeline.go, Phase.INPUT, at=recorder.mark()),))
        self.plan = plan
        return plan

    def begin_step(self, start: StepStart) -> None:
        """Open a step: its batch is about to be handed out."""
        step, units = start.step, start.units
        now_s = perf_counter()
        wall_s = None if self._handed_out_s is None else now_s - self._handed_out_s
        self._handed_out_s = now_s
        opened = StepState(step, start.num_samples, start.global_num_samples, start.data_s, wall_s)
        thread_id = opened.thread_id = threading.get_ident()
        opened.work, opened.checksum = start.work, start.checksum
        opened.equal_forwards = start.equal_forwards
        opened.stopping, opened.plan = self._exchange.stopping, self.plan
        trains = self._thread_id is None or self._thread_id == thread_id
        loop = self._loop
        if loop.newest < 0:
            loop.begin(step)
        opened.follows = trains and loop.newest <= loop.newest_used
        if not opened.follows:
            for other in tuple(self._steps.values()):
                other.follows &= other.is_used
        if loop.newest_used < step - 1:
            self._blind.handed_out(step, loop.newest_used, self._num_without_backward)
        loop.looks_ahead |= not opened.follows
        loop.newest = step  # last: another thread may ask which ones are unused
        self._steps[step] = opened
        while len(self._steps) > _MOST_OPEN:
            del self._steps[next(iter(self._steps))]
        if units is not None:
            opened.units = units
            opened.unit_sum = self._exchange.units.add(step, units)
        if opened.follows:
            self._go_to(opened)

    def begin_forward(self, step: int, part: MicroBatch, *, is_last: bool) -> None:
        """Open a ticket for a batch that is handed out next: one a step in plain loops."""
        opened, num_samples = self._steps[step], part.num_samples
        if self._cuts and self._step is not opened:
            self._go_to(opened)
        weight, key = self._weights.of(opened, num_samples, part.units)
        if self._outputs.resting is not opened.plan and opened.num_forwards == 0:
            self._outputs.begin_step(opened)
        # In a loop that uses each batch before the next one, there is nothing to distinguish.
        loop = self._loop
        peeks = loop.num_batches < _NUM_PEEKED or loop.looks_ahead
        loop.num_batches += 1
        ticket = Ticket(opened, num_samples, weight, key, is_last, part.units, keys=part.keys)
        self._tickets.open(ticket, part.batch, peeks=peeks)
        opened.on_last_forward = is_last
        opened.num_forwards += 1
        if opened.num_forwards == 1 and (self._cuts or opened.follows):
            opened.has_begun = True
            self.recorder.begin()
        else:
            self.recorder.end_fetch()
        opened.largest = max(opened.largest, num_samples if part.sizes is None else part.size)

    def claim(
        self, step: int, *, speed: float | None = None, own: bool = False
    ) -> tuple[Claim, ...]:
        """Return what this rank computes next of ``step``; nothing if it is done."""
        if self._is_closed:
            raise RuntimeError("The balancer was closed, and with it this loader.")
        return self._exchange.claims.claim(step, speed=speed, own=own)

    def begin_claim(self) -> None:
        """Stop the clock, once a device is done: this rank asks for more, or waits for samples.

        A device that runs behind would claim all there is for work that it has not begun.
        """
        self.recorder.pause()

    def end_claim(self, step: int, num_samples: int) -> None:
        """Continue with what was claimed of ``step``; the wait counts as one for input."""
        opened = self._steps[step]  # not always the one under way: a loop may fetch ahead
        opened.num_samples += num_samples
        opened.data_s += self.recorder.resume()

    def found_limit(self, limit: int) -> None:
        """Pass on, with every report from now on, how large one forward may be."""
        self._reporter.limit = limit
        self._reporter.begin_step()  # the peak of what was tried, or failed, is no step's own

    def ran_out_of_memory(self, limit: int, *, again: bool) -> None:
        """Take back a forward that did not fit; ``again`` is all of the step."""
        self.found_limit(limit)
        step = self._step
        assert step is not None
        step.again = True
        self._tickets.retire(lambda ticket: ticket.step is step and not ticket.num_backwards)
        if again:
            step.num_forwards = step.num_backwards = step.largest = 0
        else:
            step.num_forwards -= 1

    def came_to_end(self) -> None:
        """Note that a loop came to its end, and no error ended it: no forward may follow."""
        if self._step is not None and self._step.num_backwards and self._trains():
            self._check_over()

    def end_epoch(self) -> None:
        """Note that a loop is over: batches that it fetched ahead may still be used."""
        self._tickets.end_loop()
        self._loop.end_loop()
        self._handed_out_s = None
        if not self._trains():
            return
        step = self._step
        if step is not None and step.num_backwards:
            self._finish(step)
        elif step is not None and not step.is_used:
            self._step = None

    @contextmanager
    def named(self, batch: Any) -> Iterator[None]:
        """Have forwards in the block belong to ``batch``, as it was handed out.

        Raises:
            ValueError: it was not, or all of it has been freed.
            RuntimeError: no batch was.
        """
        if not self._is_open:
            raise RuntimeError("No batch was handed out yet: loop over what `prepare` returned.")
        before, self._named = self._named, self._tickets.of(batch)
        try:
            yield
        finally:
            self._named = before

    def begin_use(
        self, model: int, tensors: Sequence[torch.Tensor], *, reduces: bool | None
    ) -> ForwardRecord | None:
        """Return what the forward under way keeps for its backward; None outside of a step."""
        match = self._named or self._tickets.match(tensors)
        if match is None:
            return None
        if self._lost_ranks.wrong is not None:
            raise self._lost_ranks.wrong
        self._thread_id = threading.get_ident()
        ticket = match.tickets[0]
        use = self._newest_use = ForwardRecord(
            match, ticket, match.weight, model, reduces, ticket.step.compares
        )
        if match.is_open and reduces:
            use.weight = partial(self._weights.by_others, use, self._books)
        step = ticket.step
        if step is not self._step:
            self._go_to(step)
        if not step.is_used:
            step.is_used = True
            follows = step.has_begun and step.follows and step.thread_id == self._thread_id
            if not follows or self._at_first_forward:
                self._begin_to_use(step, follows=follows)
        self.recorder.close_gap()
        self._watch.num_samples = ticket.num_samples
        for begin_forward in self._at_forward:
            begin_forward(ticket.num_samples, is_last=ticket.is_last)
        self.recorder.saw_inputs(tensors)
        return use

    def outside(self) -> None:
        """Warn once of a forward in training that belongs to no batch that was handed out."""
        if self._loop.newest >= 0 and not self._is_alone:
            self._warn_of_forward(
                "The inputs of a forward in training are not from any batch of a balanced loader. "
                "Its gradient has the same weight on every rank, which is right only if the ranks' "
                "batches have one size. If the inputs are a copy of a batch, name the batch: "
                "`with balancer.step(batch): ...`, with `batch` as the loader handed it out."
            )

    def end_use(self) -> None:
        """Note that the forward is over."""
        self._watch.num_samples = 0
        self.recorder.open_gap()

    def use_of_loss(self) -> ForwardRecord | None:
        """Return the newest forward's; None where the step has had none."""
        use = self._newest_use
        is_past = use is not None and self._step not in (None, use.ticket.step)
        return None if is_past else use

    def backward_done(self, uses: Sequence[ForwardRecord]) -> None:
        """Take the time: this rank's own backward is done, the others' may not be."""
        step = self._step
        reduced = self._books.add(uses)
        for use in uses:
            if use.looks:
                self._outputs.note(use.model, use.ticket, use.looks)
        if self._outputs.unread:
            self._outputs.read()
        if step is None:
            self._exchange.divergence.send(reduced)
            return
        self.recorder.end()
        self._note_backward(step, uses)
        foreseen = self._backwards_per_forward * step.num_forwards
        if step.on_last_forward and step.num_backwards == foreseen and not step.reported:
            self._reporter.send(step, reduced=reduced)
        elif reduced:
            self._exchange.divergence.send(reduced)
        lost = self._lost_ranks  # as `enter_collective`, without a call
        lost.thread_id, lost.collective_s = threading.get_ident(), monotonic()
        for backward_done in self._at_backward_done:
            backward_done()

    def reduced(self) -> None:
        """Note that the collectives of a backward are over."""
        self._exchange.last_reduced = self._reporter.reducing
        for call in self._at_reduced:
            call()
        self.recorder.waited(opens=self._step is not None and not self._step.reported)
        self._lost_ranks.collective_s = None

    def close(self) -> None:
        """Report what is still to be: all ranks end with the newest step, even if unused.

        And have what a device was late with read, as far as it is there.
        """
        if self._step is not None and self._step.num_backwards:
            self._finish(self._step)
        self._reporter.close()
        newest = self._steps.get(self._loop.newest)
        if newest is not None and not newest.reported:
            self._reporter.send(newest)
        self._outputs.read()
        self._outputs.report()
        self.recorder.close()
        self._is_closed = True

    def collective(self, *, entered: bool) -> None:
        """Note that the main thread enters or leaves a collective outside of a backward."""
        if self._is_open and entered:
            self._lost_ranks.enter_collective()
        elif self._is_open:
            self._lost_ranks.leave_collective()

    def report_now(self) -> None:
        """Report the step under way if that is still to be done: a collective comes first."""
        if self._step is not None and self._step.num_backwards and not self._step.reported:
            self._reporter.send(self._step)

    def timed(self, phase: Phase) -> AbstractContextManager[None]:
        """Return a context whose time is that of ``phase`` in the account of the step."""
        return self.recorder.block(phase) if self._is_open else nullcontext()

    @property
    def open_recorder(self) -> Recorder | None:
        """The recorder, while a step is under way; None outside of one."""
        return None if self._step is None else self.recorder

    @property
    def stopping(self) -> bool:
        """Whether all ranks know, as of the step under way, that one of them asked to stop."""
        step = self._steps.get(self._loop.newest) if self._step is None else self._step
        return step is not None and step.stopping

    @property
    def next_unused(self) -> int | None:
        """The first step that was handed out and not used, else the next; None before the first."""
        return self._loop.next_unused

    @property
    def num_samples(self) -> int | None:
        """Samples of this rank in the step under way; None outside of one."""
        return None if self._step is None else self._step.num_samples

    @property
    def newest_num_samples(self) -> int | None:
        """Samples of this rank in the newest step that was handed out; None before the first."""
        step = self._steps.get(self._loop.newest)
        return None if step is None else step.num_samples

    @property
    def num_samples_seen(self) -> tuple[int, int]:
        """Samples that this rank trained on: in the run, and in its newest step with a backward."""
        step, (total, newest) = self._step, self._seen
        if step is None or step.is_over or not step.num_backwards:
            return total, newest
        return total + step.num_samples, step.num_samples

    @property
    def num_units(self) -> float | None:
        """Units of this rank in the step under way, samples or others; None outside of one."""
        step = self._step
        if step is None and self._loop.looks_ahead and self._newest_use is not None:
            step = self._newest_use.ticket.step  # the next one has no forward yet
        if step is None:
            return None
        return step.num_samples if step.units is None else step.units

    def _num_without_backward(self) -> int:
        """Return how many steps had a forward since the newest backward."""
        steps = tuple(self._steps.values())  # another thread may hand out meanwhile
        return sum(step.is_used and not step.num_backwards for step in steps)

    def _trains(self) -> bool:
        return self._thread_id is None or self._thread_id == threading.get_ident()

    def _go_to(self, step: StepState) -> None:
        """Have ``step`` be the one under way."""
        before = self._step
        if before is not None and before.num_backwards:
            self._finish(before)
        elif before is not None and before.is_used:
            before.is_clear = False  # its backward comes among forwards of another
        self._step = step
        if step.is_used:
            step.is_clear = False
        else:
            if self.num_steps >= self.looks.due:
                self.looks.turn(self.num_steps)
            for begin_step in self._at_begin:
                begin_step(step.number)
            self.recorder.next_step(step.number)
            if self._reporter.reads or len(self.recorder.notes) > MOST_NOTES:
                self._reporter.begin_step()

    def _begin_to_use(self, step: StepState, *, follows: bool) -> None:
        """Have the first forward of a step begin: its batch may have been fetched long before."""
        if not follows:
            step.has_begun = True
            self.recorder.begin()
        if self._at_first_forward and not step.is_over:
            self.recorder.close_gap()
            for first_forward in self._at_first_forward:
                first_forward(equal_forwards=step.equal_forwards)

    def _check_over(self) -> None:
        for check in self._checks:
            check()

    def _note_backward(self, step: StepState, uses: Sequence[ForwardRecord]) -> None:
        """Count a backward for every step that it went through."""
        newest, loop = uses[0].ticket.step, self._loop
        through: list[StepState] = []
        for use in uses:
            ticket = use.ticket
            ticket.num_backwards += 1
            ticket.is_trained |= use.match.is_certain
            if (one := ticket.step) not in through:
                through.append(one)
                one.num_backwards += 1
                loop.newest_used = max(loop.newest_used, one.number)
                if one.number > newest.number:
                    newest = one
        self.plan_in_use = newest.plan
        if len(through) > 1 or newest is not step:
            for one in (step, *through):
                one.is_clear = False
        if step.reported and not step.is_over:  # too early: one backward more than was foreseen
            step.is_underrated = True

    def _finish(self, step: StepState) -> None:
        """End a step that has had its backwards."""
        self._step = None
        if step.is_over:
            return
        self._seen = self._seen[0] + step.num_samples, step.num_samples
        step.is_over = True
        if not step.reported:
            self._reporter.send(step)
        for end_step in self._at_end:
            end_step(step.number)
        each, rest = divmod(step.num_backwards, max(step.num_forwards, 1))
        self._backwards_per_forward = 0 if rest or step.is_underrated else each
        self.num_steps += 1
