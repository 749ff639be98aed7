"""What is reported to rank 0 of each step, as early as it can be complete.

Time that goes into compiling is no time of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn

from ..._exchange._exchange import Exchange
from ..._exchange._internal import fault_in_words, log_fault
from ..._exchange._message_kinds import Message, Reduced, StepReports, TimesReport
from ..._nested_tensors import tensors_in
from ..._planner import Report, blaming
from ..._private_torch import IN_PLACE, compile_callbacks, compiling, mark_dynamic
from ..._run._machine_reader import MachineReader, read_by
from ..._run._step_state import StepObserver, StepState
from ..._torch_clock import CompileClock
from ..._warning import warn
from .._options import MemoryReader
from ._marks import MOST_NOTES, PendingTime, Recorder

# Compilations of one piece of code that are left when the sizes are held: for the short last step
# of an epoch, and for a plan that was on its way already.
_RESERVE = 2


class CompileWatch(StepObserver):
    """Notices compilations in this process while it trains; costs nothing where there are none.

    torch calls back at the start of each compilation: forward, backward, autotuning of kernels,
    recording of CUDA graphs. Whatever is compiled in a step, that step's time is not the model's.
    What is compiled in the forward of a balanced model is counted by its code: compiled for a
    second size or more, and close to the limit, the sizes are to be held.

    Attributes:
        clock: how long it took.
        marks: whether a balanced model as a whole is compiled, so that its inputs are marked.
        has_parts: whether one has compiled parts, whose own inputs are marked.
        varies: whether sizes change at all, so that there is something to mark.
        on_cuda: whether models compute there, where cudnn may tune for every new size.
        holds: whether another size might leave a model uncompiled.
        num_samples: of the forward under way; 0 outside of one, or in one that is none of training.
    """

    def __init__(self) -> None:
        self.clock = CompileClock()
        self.marks = False
        self.has_parts = False
        self.holds = False
        self._places: list[tuple[Any, dict[str, Any], Callable[[], None]]] = []
        self.varies = True
        self.on_cuda = False
        self._handler: Any = None
        self._stalled = False
        self.num_samples = 0
        self._sizes: defaultdict[int, set[int]] = defaultdict(set)  # by piece of code
        self._tuned: set[int] = set()  # sizes that convolutions were tuned for
        self._advice = ""

    @property
    def stalled(self) -> bool:
        """Whether something was compiled, or tuned, in the step under way."""
        handler = self._handler
        return self._stalled or (
            handler is not None and self._noticed not in handler.start_callbacks
        )

    def before_steps(self, hooks: Iterable[Any], place: Callable[[], None]) -> None:
        """Have ``place`` called before a step if a module of ``hooks`` was compiled meanwhile.

        Args:
            hooks: each a module's, as `OuterHooks`.
            place: puts them where they belong now.
        """
        self._places += [(one, one.module.__dict__, place) for one in hooks]

    def begin_step(self, step: int) -> None:
        """Begin to look at a step, and say once what was found in those before."""
        self._stalled = False
        if self._handler is None:  # nothing can be compiled before torch's compiler is imported
            self._handler = compile_callbacks()
        handler = self._handler
        if handler is not None and self._noticed not in handler.start_callbacks:
            handler.register_start_callback(self._noticed)  # again, where a reset forgot it
            self.clock.listen()
        for hooks, namespace, place in self._places:
            if namespace.get(IN_PLACE) is not hooks.call:
                place()
        if self._advice:
            text, self._advice = self._advice, ""
            warn(text)

    def tunes(self, num_samples: int, *, is_last: bool) -> None:
        """Note that convolutions are tuned for a new number of samples, on CUDA."""
        if torch.backends.cudnn.benchmark and num_samples not in self._tuned:
            self._stalled = True
            self._tuned.add(num_samples)

    def mark(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        """Mark the batch dimension of tensors as dynamic, so that no size gets its own graph.

        Weakly: where a model needs a fixed size, it is compiled with that and nothing is refused.
        At the model and not in the loader, as marks do not survive ``batch.to(device)``.
        """
        size = self.num_samples
        if size < 2 or not self.varies:  # torch takes 0 and 1 for constants
            return
        for tensor in tensors_in((inputs, keywords)):
            if tensor.dim() and tensor.shape[0] == size:
                mark_dynamic(tensor)

    def close(self) -> None:
        """Stop listening."""
        self._places.clear()
        self.clock.close()
        handler = self._handler
        if handler is not None and self._noticed in handler.start_callbacks:
            handler.remove_start_callback(self._noticed)

    def _noticed(self, *_: Any) -> None:
        """Be called back by torch, in the middle of a forward or a backward."""
        self._stalled = True
        if self.num_samples and torch.is_grad_enabled():
            self.marks |= not self.has_parts  # a model that was compiled after it was prepared
            self._count()

    def _count(self) -> None:
        if (now := compiling()) is None:
            return
        sizes = self._sizes[now.code]
        sizes.add(self.num_samples)
        if len(sizes) > 1 and now.limit - (now.num_before + 1) <= _RESERVE and not self.holds:
            self.holds = True
            self._advice = (
                f"A balanced model was compiled {now.num_before + 1} times, for the batch sizes "
                f"{sorted(sizes)} among others. At {now.limit} times torch would run it "
                f"uncompiled with only a line in a log, so all sizes stay as they are from here "
                f"on. Have the model use its batch size as a tensor shape only, raise "
                f"`torch._dynamo.config.recompile_limit`, or keep one shape with "
                f"`Bounds(vary='count', granularity=...)` in a loop over `loader.steps()`."
            )


# Nothing waits for where the time went. Between two steps all code has left the processor's caches,
# so that the times of ten steps take hardly longer than those of one.
_TIMES_S = 0.5


class Reporter:
    """Sends one message a step, with the measurements that are complete by then.

    Measuring is nothing that training needs: where it fails, rank 0 is notified and has all ranks
    continue with equal sizes, and nothing is read any more.

    Args:
        exchange: carries reports.
        recorder: has noted where the time of a step went.
        watch: notices what is compiled in a step.
        memory: read at each step beside the time; None reads none.
        machine: likewise, what this rank can have of its machine.
        exact: whether to wait for the device, so that nothing is late.

    Attributes:
        reads: whether something is read beside the time.
        limit: the largest forward that this rank may have; None if none failed. It goes with
            every report, because a step that some rank could not time is never complete.
        reducing: the newest reported step whose last backward sums gradients; not on a device,
            which may be behind.
    """

    def __init__(
        self,
        exchange: Exchange,
        recorder: Recorder,
        watch: CompileWatch,
        memory: MemoryReader | None = None,
        machine: MachineReader | None = None,
        *,
        exact: bool,
    ) -> None:
        self._exchange = exchange
        self._recorder = recorder
        self._watch = watch
        self._memory, self._machine = memory, machine
        self.reads = memory is not None or machine is not None
        self._exact = exact
        self._pending: list[tuple[StepState, PendingTime, dict[str, Any]]] = []
        self.limit: int | None = None
        self._reporting = Lock()  # the channel's thread makes reports
        self._has_failed = False
        self._fault = ""  # to be sent with the next report
        self.reducing = -1

    def begin_step(self) -> None:
        """Have a step begin for all that is read, if there is something, or too much was noted."""
        try:
            if len(self._recorder.notes) > MOST_NOTES:  # the channel's thread may be stopped
                self._recorder.settle()
            if self._memory is not None:
                with blaming(self._memory):
                    self._memory.reset()
        except Exception as error:
            self._give_up(None, error)

    def send(self, step: StepState, *, reduced: Sequence[Reduced] = ()) -> None:
        """Report this step, with what a device was late with of earlier ones.

        Args:
            step: the one under way.
            reduced: what its gradients were made of.
        """
        step.reported = True
        again: tuple[Report, ...] = ()
        try:
            counts = step.has_begun and step.is_clear and not step.again
            if counts and not self._watch.stalled:
                fields = self._read() if self.reads else {}
                self._recorder.note((self._measured, step, fields))
            if step.again:
                again = (self._report(step, 0.0, self._read() | {"peak_bytes": 0}),)
        except Exception as error:
            self._give_up(step.number, error)
        made: Callable[[], Sequence[Message]] = partial(self._made, step, reduced, again)
        if self._recorder.clock.is_late:
            # Now: another thread that asks CUDA for an event breaks a graph's capture under way.
            messages = made()
            made = partial(tuple, messages)
        elif reduced:  # a device may be behind with it
            self.reducing = step.number
        is_used = step.num_backwards > 0
        self._exchange.report(step.number, made, is_used=is_used)

    def close(self) -> None:
        """Report where the time of the last steps went, as far as a device is through with them."""
        try:
            self._recorder.settle()
            times = self._times(least_s=0.0)
        except Exception as error:
            self._give_up(None, error)
        else:
            self._exchange.send(times)

    def _made(
        self, step: StepState, reduced: Sequence[Reduced], again: tuple[Report, ...]
    ) -> Sequence[Message]:
        """Return the messages of a report."""
        times: list[Message] = []
        try:
            self._recorder.settle()
            ready = [*self._complete(), *again]
            times = self._times(least_s=_TIMES_S)
        except Exception as error:
            self._give_up(step.number, error)
            ready = []
        if self._fault and not ready:
            ready = [self._report(step, 0.0, {})]
        return [*reduced, *times, StepReports(step.number, tuple(ready))]

    def _measured(self, step: StepState, fields: dict[str, Any]) -> None:
        if (time := self._recorder.meter.take()) is not None:
            self._pending.append((step, time, fields))

    def _times(self, *, least_s: float) -> list[Message]:
        """Return what there is to report of where the time went, once it is of so many seconds."""
        times: list[Message] = []
        with self._reporting:
            clues = self._recorder.clues
            for number, spent_us in self._recorder.take_times(least_s=least_s):
                noticed = (None, None) if clues is None else clues.take(number)
                times.append(TimesReport(number, spent_us, *noticed))
        return times

    def _complete(self) -> list[Report]:
        """Return what is complete."""
        ready: list[Report] = []
        while self._pending:
            measured, pending, fields = self._pending[0]
            compute_s = pending.seconds(block=self._exact)
            if compute_s is None:
                break
            del self._pending[0]
            ready.append(self._report(measured, compute_s, fields))
        return ready

    def _read(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if (memory := self._memory) is not None:
            with blaming(memory):
                fields["peak_bytes"] = int(memory.peak_bytes())
                fields["capacity_bytes"] = int(memory.capacity_bytes())
        if (machine := self._machine) is not None:
            fields["free_cpu"], fields["free_memory_bytes"] = read_by(machine) or (None, 0)
        return fields

    def _give_up(self, step: int | None, error: Exception) -> None:
        """Read nothing any more, and report to rank 0 why."""
        if not self._has_failed:
            log_fault(
                step, error, "All ranks go on with equal batch sizes for the rest of the run."
            )
            self._has_failed, self._fault = True, fault_in_words(error)
        self._memory = self._machine = None
        self.reads = False
        self._pending.clear()

    def _report(self, step: StepState, compute_s: float, fields: dict[str, Any]) -> Report:
        fault, self._fault = self._fault, ""
        return Report(
            step=step.number,
            batch_size=step.num_samples,
            global_num_samples=step.global_num_samples,
            compute_s=compute_s,
            data_s=step.data_s,
            wall_s=step.wall_s,
            holds=self._watch.holds,
            limit=self.limit,
            largest_forward=step.largest,
            again=step.again,
            fault=fault,
            work=step.work,
            **fields,
        )
