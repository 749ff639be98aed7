"""One rank's part in a run: connected in ``prepare``, opened at the first loop, closed once."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, final

import numpy as np
import torch

from .._exchange._exchange import Exchange
from .._exchange._mailbox import Mailbox
from .._host import GarbageClock
from .._planner import AbstractPlanner, ClaimSwitch, CostPlanner, Job, Plan, Planner
from .._run._estimates import Estimates
from .._run._machine_reader import machine_reader_of
from .._run._runtime import RunRecord, RunSettings, lead, open_channel
from .._torch_clock import alloc_retries
from ..claims import Hybrid
from ..events import Event, Hook
from ..exceptions import RanksDivergedError, WorkerLostError, invalid
from ..policies import AbstractPolicy, Auto, Equal, Fixed
from ..timemodels._memory_model import MemoryModel
from ._data.loaders._stream import StreamLoader
from ._data.order._drawing import length_of
from ._exchange._crew import Crew
from ._exchange._side_group import PeerGroup
from ._exchange._startup import (
    TORCH,
    WorkerFacts,
    addresses_of,
    break_off,
    gather_facts,
    ports_of_store,
)
from ._model._models import device_of
from ._model._wrapping import Wrapping
from ._options import CudaMemory, Runtime
from ._prepared_run import PreparedRun
from ._step._tracker import StepTracker

_MOST_VIEWS = 8  # of each sample, in the sizes that an error names


def hint_of_rows(steps: StepTracker) -> str:
    """Return what to do if a collective over rows has ended a rank; nothing if none could."""
    recorder, sizes = steps.open_recorder, _sizes(steps)
    if recorder is None or not recorder.has_others or len(set(sizes)) < 2:
        return ""
    return (
        f"; if that was in a collective of the script's own over rows, such as `all_gather` of "
        f"features: ranks have {_listed(sizes)} samples in this step, so pad the rows to "
        f"{max(sizes)} (what a loss over them then needs is in docs/units.md), or use "
        f"`Balancer(policy='equal')`"
    )


def note_sizes(error: BaseException, steps: StepTracker) -> None:
    """Add to an error that ends the script, and names a batch size, that this rank has another one.

    As where labels or masks are made for `args.batch_size` rows. Errors of evenstep's own say what
    there is to say.
    """
    sizes, num_samples = _sizes(steps), steps.newest_num_samples  # its loop may be over by now
    equal = sum(sizes) // len(sizes) if sizes else 0
    if not equal or num_samples in (None, 0, equal) or not isinstance(error, _OF_SHAPES):
        return
    if _is_own(error.__traceback__) or not _names(str(error), (equal, num_samples)):
        return
    note = (
        f"evenstep: this rank has {num_samples} samples in this step, not {equal} as in an equal "
        f"split; ranks have {_listed(sizes)}. What is made for a fixed batch size, such as labels "
        f"or masks, does not fit: take `len(batch)`, or use `Balancer(policy='equal')`. If sizes "
        f"have to be even, `Bounds(granularity=2)` keeps them so."
    )
    error.add_note(note)
    if getattr(sys, "last_value", None) is error:  # it was printed already: no `with` block
        logging.getLogger("evenstep").error("%s", note)


_OF_SHAPES = (RuntimeError, IndexError, ValueError, AssertionError)


def _sizes(steps: StepTracker) -> tuple[int, ...]:
    return () if steps.plan is None else steps.plan.batch_size


def _names(text: str, sizes: Sequence[int]) -> bool:
    """Return whether a text is of batch sizes, or has some views of one among its numbers."""
    numbers = {int(number) for number in re.findall(r"\b\d{1,9}\b", text)}
    wanted = {size * views for size in sizes for views in range(1, _MOST_VIEWS + 1)}
    return "batch size" in text.lower() or not numbers.isdisjoint(wanted - {1})


def _is_own(trace: TracebackType | None) -> bool:
    name = ""
    while trace is not None:
        name, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return name.partition(".")[0] == "evenstep"


def _listed(sizes: Sequence[int]) -> str:
    """Return the sizes in words, at most eight of them."""
    shown = [str(size) for size in sizes[:8]]
    if len(sizes) > len(shown):
        return f"{', '.join(shown)}, ... (from {min(sizes)} to {max(sizes)})"
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def claims_of(
    policy: AbstractPolicy[Any],
    job: Job,
    runtime: Runtime,
    *,
    counts_units: bool,
    has_peers: bool,
    has_streams: bool,
) -> ClaimSwitch | None:
    """Return what decides on claims; None where there are none.

    Args:
        policy: decides the sizes.
        job: what is planned for.
        runtime: says whether they are wanted.
        counts_units: whether the loss is a mean over something else than samples: then all ranks
            have to know all units before the first backward ends.
        has_peers: whether several ranks get the same batches, as under tensor parallelism.
        has_streams: whether samples come from an ``IterableDataset``, in the order they come in.

    Raises:
        ValueError: claims were asked for by ``Runtime(claims=Hybrid(...))``, and cannot be.
    """
    wanted = runtime.claims
    problem = _problem(job, counts_units=counts_units, has_peers=has_peers, has_streams=has_streams)
    if isinstance(wanted, Hybrid) and problem is not None:
        rule = "be used where every rank can take more micro-batches as it goes"
        raise invalid("Runtime(claims=Hybrid(...))", rule, *problem)
    if wanted == "off" or problem is not None or job.world_size == 1:
        return None
    if isinstance(wanted, Hybrid):
        return ClaimSwitch(wanted, adaptive=False)
    return ClaimSwitch(Hybrid(), adaptive=True) if _is_auto(policy) else None


def _problem(
    job: Job, *, counts_units: bool, has_peers: bool, has_streams: bool
) -> tuple[str, str] | None:
    """Return what stands against claims, and what to do about it; None if nothing does."""
    if not job.cuts:
        return "a loop over `loader`", "Loop over `loader.steps()` and its micro-batches."
    if job.bounds.max == "probe":
        return "`Bounds(max='probe')`", "Give `Bounds(max=...)` a number."
    if job.smallest > 1 and job.bounds.vary == "size":
        which = "a compiled model or local BatchNorm, to which sizes are not free"
        return which, 'Use `Bounds(vary="count")`, with forwards of one shape.'
    if len(np.unique(job.bounds.granularity)) > 1:
        which = f"different granularities, {job.bounds.granularity}"
        return which, "Give `Bounds(granularity=...)` one number."
    if counts_units:
        return "a unit other than samples", 'Use `Balancer(unit="samples")`.'
    if has_peers:
        return "ranks that share their batches", "Leave `claims` out."
    if has_streams or job.varies:
        which = (
            "an `IterableDataset`" if has_streams else "batches of a `batch_sampler`, of any size"
        )
        return which, "Use a data set with a length and `batch_size`, or leave `claims` out."
    return None


def _is_auto(policy: AbstractPolicy[Any]) -> bool:
    """Return whether it is ``Auto``, or a wrapper's inner policy is."""
    inner = getattr(policy, "policy", None)
    return isinstance(policy, Auto) or (inner is not None and _is_auto(inner))


_OF_COLLECTIVES = ("gloo/", "NCCL", "Connection closed by peer")  # in errors of torch's backends
_VERDICT_S = 2.0
_GROWTH = 1.25  # of a size, at most at a time, where running out of memory ends the run


@final
class Session:
    """Connects this rank with the others, and opens the run at its first loop.

    Loaders and hooks hold it, and its steps, from the start.

    Args:
        parts: what the run is made of.

    Attributes:
        steps: of the run; no batch is handed out before it is open.
        exchange: with the other ranks, from ``connect`` on; None before.
    """

    def __init__(self, parts: PreparedRun) -> None:
        self._parts = parts
        self.steps = parts.steps
        self.exchange: Exchange | None = None
        self._facts: list[WorkerFacts] = []  # of every rank, servers last
        self._lag = 0  # steps by which a plan trails its measurement
        self._listeners: list[Callable[[Plan], None]] = []
        self._estimates = Estimates()
        self._emit: Hook | None = None  # events from before the run is open are only logged
        self._record: RunRecord | None = None
        self._cuts: bool | None = None  # None until the run is open
        self._closed = False
        self._garbage = GarbageClock()

    def connect(self, device: torch.device) -> None:
        """Connect this rank with the others. Collective: all ranks do so together.

        From then on nothing that starts a step is a collective, so that any thread may read the
        loader, and the loss of a rank has a name before the first step too.

        Args:
            device: where this rank computes.
        """
        crew, runtime = self._crew, self._parts.runtime
        late = device.type != "cpu" and runtime.freshness == "newest"
        self._facts = gather_facts(crew, WorkerFacts.here(device, lag=int(late)))
        self._lag = max(worker.lag for worker in self._facts[: crew.num_workers])
        self.exchange = Exchange(
            crew.side.rank,
            crew.hosts(self._facts),
            open_channel(crew, runtime, addresses_of(self._facts)),
            framework=TORCH,
            lag=self._lag,
            num_servers=crew.num_servers,
            emit=self._pass_on,
            heartbeat_s=runtime.heartbeat_s,
            hang_s=runtime.hang_s,
            grace_s=3 * runtime.heartbeat_s,
            release=self._release,
        )
        self.exchange.lost_ranks.explain = partial(hint_of_rows, self.steps)
        self.exchange.start()
        crew.watch_by(self.exchange.lost_ranks)

    def begin_epoch(self, *, cuts: bool) -> None:
        """Open the run if it is not yet.

        Args:
            cuts: whether the loop takes micro-batches.

        Raises:
            RuntimeError: the run was opened with the other kind of loop.
        """
        if self._closed:
            raise RuntimeError(
                "The balancer was closed, and with it this loader. Loop inside the `with` block, "
                "or before `close()`; a new `Balancer` starts a new run."
            )
        if self._cuts is None:
            self._open(cuts=cuts)
            self._cuts = cuts
        elif cuts != self._cuts:
            raise RuntimeError(
                "This run mixes `for batch in loader` with `loader.steps()`. Memory bounds the "
                "whole batch in one and a micro-batch in the other: use one kind of loop."
            )
        assert self.exchange is not None
        self.exchange.num_loops += 1

    def subscribe(self, listener: Callable[[Plan], None]) -> None:
        """Have ``listener`` called with every plan once the run is open."""
        self._listeners.append(listener)

    @property
    def mailbox(self) -> Mailbox:
        """What ranks send each other outside of collectives, once they are connected."""
        assert self.exchange is not None, "`prepare` comes first"
        return self.exchange.mailbox

    def ask_to_stop(self) -> bool:
        """Have all ranks agree to stop; return whether there is a run in which they can.

        May be called from a signal handler.
        """
        if self.exchange is None or self._cuts is None or self._closed:
            return False
        self.exchange.ask_to_stop()
        return True

    @property
    def estimates(self) -> Estimates:
        """What is known about the workers: from an earlier run until this one is open.

        Nothing from then on, on ranks other than 0.
        """
        if self.exchange is None or self._cuts is None:
            return self._estimates
        return Estimates(self._identities, self.exchange.decisions.learnt())

    def restore(self, estimates: Estimates) -> None:
        """Have the run begin with what an earlier one has learnt.

        Raises:
            ValueError: it has begun.
        """
        if self._cuts is not None:
            raise invalid(
                "Balancer.load_state_dict(...)",
                "come before the first loop over the loader",
                "a run that is under way",
                "Load into a new `Balancer`.",
            )
        self._estimates = estimates

    def loss_behind(self, error: BaseException | None) -> Exception | None:
        """Return the loss of a worker that is behind a collective's error, if that is one.

        A peer that dies in the middle of a collective breaks it for the others, with an error
        that names a port. Who it was is known a moment later. Whatever ``error`` is, it ends this
        script, which the goodbye will report.
        """
        if self.exchange is None:
            return None
        if error is None:  # after the last step, nothing else came by to say so
            if self._cuts is not None:
                self.steps.close()
                self.exchange.wait_for_reports(self.exchange.last_step, limit_s=_VERDICT_S)
            return self.exchange.lost_ranks.wrong
        self.exchange.lost_ranks.script_failed(error)
        note_sizes(error, self.steps)
        if isinstance(error, KeyboardInterrupt):
            return self.exchange.lost_ranks.interrupted_by
        ended = isinstance(error, WorkerLostError | RanksDivergedError)
        if ended or not isinstance(error, RuntimeError):
            return None
        broke = any(word in str(error) for word in _OF_COLLECTIVES)
        return self.exchange.lost_ranks.verdict(within_s=_VERDICT_S, in_collective=broke)

    def close(self) -> None:
        """Say goodbye to the others for good, and have the sinks take what is left."""
        self._closed = True
        if self.exchange is None:
            return
        try:
            if self._cuts is not None:
                self.steps.close()
        finally:  # as where a device failed, which raises whatever it is asked
            self._garbage.close()
            self.exchange.close()
            if self._record is not None:
                self._record.end(self.steps.num_steps if self._crew.side.rank == 0 else None)

    @property
    def _crew(self) -> Crew:
        assert self._parts.crew is not None, "`prepare` comes first"
        return self._parts.crew

    @property
    def _identities(self) -> list[str]:
        return [worker.identity for worker in self._facts[: self._crew.num_workers]]

    def _open(self, *, cuts: bool) -> None:
        """Open the run at its first step, when devices and the kind of loop are known."""
        parts, crew = self._parts, self._crew
        if not parts.models:
            raise RuntimeError("The loader runs without a model: `prepare` the model too.")
        device = device_of(parts.models[0].module)
        world_size, peers = crew.num_workers, crew.side.peers
        wrapping = Wrapping(parts.models, parts.bounds, world_size=world_size, cuts=cuts)
        job = parts.job(cuts=cuts)
        parts.watch.on_cuda = device.type == "cuda"
        by_size = world_size > 1 and parts.bounds.vary == "size"
        parts.watch.varies = by_size and not isinstance(parts.policy, Equal | Fixed)
        if self.exchange is None:  # with servers: in their first loop
            self.connect(device)
        assert self.exchange is not None
        # On every rank, though rank 0 alone uses it: what it refuses should raise on all of them.
        planner = self._planner(job, has_peers=peers is not None)
        speaks = crew.side.rank == 0 and not (peers is not None and peers.follows)
        self._record = RunRecord(parts.runtime, speaks=speaks)
        self._emit = self._record.emit
        self._listen(peers)
        clues = None
        if world_size > 1:
            self._garbage.open()
            clues = parts.clues(
                self._garbage,
                parts.watch.clock,
                alloc_retries=partial(alloc_retries, device),
                by_cost=parts.loaders[0].costs is not None,
            )
        recorder = wrapping.recorder(device, clues, parts.policy)
        observers = wrapping.observers(self.exchange, recorder)
        if parts.reduction is not None:
            parts.reduction.join(self.exchange, lag=self._lag, emit=self._emit)
            observers.append(parts.reduction)
        memory = parts.runtime.memory  # nothing is read on a CPU, for most policies
        if memory is None and device.type == "cuda":
            memory = CudaMemory(device)
        self.steps.open(
            self.exchange,
            recorder,
            parts.watch,
            world_size=world_size,
            loss_reduction=parts.loss_reduction,
            at_random=parts.at_random,
            exact=parts.runtime.freshness == "exact",
            cuts=cuts,
            identifies_samples=parts.runtime.sample_seed is not None,
            memory=memory,
            machine=machine_reader_of(parts.policy, parts.runtime.machine),
            versions=parts.models.version,
            peers=peers,
            observers=observers,
        )
        self._record.start()
        if crew.side.rank == 0:
            self._lead(planner, job)

    def _planner(self, job: Job, *, has_peers: bool) -> AbstractPlanner:
        parts = self._parts
        memory = MemoryModel() if parts.models.can_run_again else MemoryModel(growth=_GROWTH)
        if (costs := parts.loaders[0].costs) is not None:
            workers = [worker.device for worker in self._facts[: self._crew.num_workers]]
            kinds = [workers.index(device) for device in workers]
            by_speed = not isinstance(parts.policy, Equal)
            ahead = parts.loaders[0].num_steps_ahead
            return CostPlanner(
                job, costs, kinds=kinds, by_speed=by_speed, ahead=ahead, memory=memory
            )
        claims = claims_of(
            parts.policy,
            job,
            parts.runtime,
            counts_units=parts.counter is not None,
            has_peers=has_peers,
            has_streams=any(isinstance(loader, StreamLoader) for loader in parts.loaders),
        )
        return Planner(parts.policy, job, memory, claims=claims)

    def _listen(self, peers: PeerGroup | None) -> None:
        """Subscribe the loaders to plans: those of the peer that leads, where this rank follows."""
        assert self.exchange is not None
        follows = peers is not None and peers.follows
        for listener in self._listeners:
            (peers if peers is not None and follows else self.exchange).subscribe(listener)
        if peers is not None and not follows:
            self.exchange.subscribe(peers.on_plan)

    def _lead(self, planner: AbstractPlanner, job: Job) -> None:
        """On rank 0: say that the run begins, and plan its first step."""
        assert self.exchange is not None
        facts, parts = self._facts[: self._crew.num_workers], self._parts
        lead(
            self.exchange,
            planner,
            RunSettings(parts.policy, job, length_of(parts.loaders[0]) or 0, self._estimates),
            self._pass_on,
            hosts=[worker.host for worker in facts],
            devices=[worker.device for worker in facts],
            workers=self._identities,
        )
        if parts.reduction is not None:
            parts.reduction.lead()

    def _release(self) -> None:
        """Have threads that wait in a collective of gloo's come out of it."""
        addresses = {address for worker in self._facts for address in worker.addresses}
        break_off(addresses, spared_ports=ports_of_store())

    def _pass_on(self, event: Event) -> None:
        if self._emit is not None:
            self._emit(event)
