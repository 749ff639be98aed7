"""The public face: three lines in a training script."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.utils.data import DataLoader

from .._settings import checked_policy, checked_reduction
from ..control import Bounds, Job, Plan
from ..policies import AbstractPolicy, Equal, Fixed
from ..timemodels import ClusterProfile
from . import _arguments as arguments
from ._checkpoint._estimates import Estimates
from ._data._eval import EvalLoader, is_lockstep
from ._data._global_batch import agreed_batch_size
from ._data._loader import BalancedLoader
from ._data._served import ServerEval, ServerLoader, evaluation
from ._data._step import StepCount
from ._data._stream import StreamLoader
from ._data._stream_prepare import balanced_loader, check_is_loader, num_steps_of
from ._data._stream_terms import StreamKind
from ._exchange._crew import Crew
from ._exchange._startup import Alone, SideGroup
from ._fabric import FabricLoader, as_wrapped, still_wrapped, wrapped_loader, wrapped_model
from ._job import job_of
from ._link import RunLink
from ._means import mean_over
from ._memory._layout import layout_by
from ._memory._probe import Closure
from ._memory._replay import Replay
from ._model._compile_watch import CompileWatch
from ._model._compiled import check_compiled, ddp_of
from ._model._models import (
    BalancedModel,
    Weighting,
    check_unprepared,
    device_of,
    warn_batch_norm,
    with_ddp,
)
from ._model._prepared import PreparedModels
from ._model._running_stats import RunningStats
from ._model._self_test import self_test
from ._model._units import Unit, counter_of
from ._model._weighting import Backward, scale
from ._model._wrapping import Wrapping
from ._network import Network
from ._options import Runtime
from ._profile._profiler import Profiler, Request
from ._reduce._reduction import Reduction
from ._run import Run, RunSettings
from ._service import Service
from ._switch import kind_by_switch


class Balancer:
    """Sizes every worker's share of the same global batch so that all finish together.

    Usage:
        balancer = Balancer()
        model, loader = balancer.prepare(DDP(model), loader)
        for x, y in loader:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Every iteration is one step of the whole cluster, on the global batch that plain training
    would take; each rank gets its part of it, sized by the policy from the times measured so far.
    The gradient is the mean over that global batch, whatever the sizes. With one process, or
    without a process group, the script runs unchanged.

    Right for losses that are means (or, if said so, sums) over samples or over other units. Local
    batch normalisation sees uneven batches and is warned about; contrastive losses over a rank's
    own batch are not sums over samples, and no weight makes them exact. ``check_loss`` tells what
    a loss is.

    Args:
        global_batch_size: samples per optimizer step over all workers. None is the loader's
            ``batch_size`` times the number of workers, as in plain training.
        policy: decides the sizes: a name (``"auto"``, ``"equal"``, ``"dynamic-batching"``,
            ``"lb-bsp-2020"``, ``"lbb"``), ``"module:Class"``, or a policy.
        unit: what the loss is a mean over: ``"samples"``; ``"tokens"``, the targets other than
            -100 in batches as Hugging Face's collators make them; or a function that is given a
            batch as the loop gets it and returns how much the loss divides by: its valid targets,
            their class weights' sum. A forward then weighs by its units. Plans count samples
            still.
        loss_reduction: what the user's loss does over the units of a forward, ``"mean"`` or
            ``"sum"``. Nothing in the tensors tells them apart. A sum is left as plain DDP has it,
            which averages over ranks: the sum over the global batch over their number.
        bounds: limits on every worker's samples.
        runtime: heartbeats, deadlines, the line for people, how memory is read.
        run_dir: folder for ``events.jsonl``, written by rank 0; None writes none.
        process_group: the data-parallel ranks; None is all of them.
        network: sums gradients by shares that fit the links, and says which ranks hold no data and
            only sum; None is plain all-reduce.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        global_batch_size: int | None = None,
        *,
        policy: str | AbstractPolicy[Any] = "auto",
        unit: Unit = "samples",
        loss_reduction: Literal["mean", "sum"] = "mean",
        bounds: Bounds = Bounds(),  # noqa: B008  # a frozen value
        runtime: Runtime = Runtime(),  # noqa: B008  # a frozen value
        run_dir: str | Path | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        network: Network | None = None,
    ) -> None:
        self.__class__ = kind_by_switch(type(self))  # a `__new__` would hide the signature
        self._loss_reduction = checked_reduction(loss_reduction)
        arguments.check_size(global_batch_size)
        self._global_batch_size = global_batch_size
        self._policy = checked_policy(policy)
        self._counter = counter_of(unit, loss_reduction=loss_reduction)
        self._bounds = bounds
        self._runtime = runtime
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._process_group = process_group
        self._network = arguments.checked_network(network)
        self._reduction: Reduction | None = None
        self._weighting: Weighting | None = None
        self._watch = CompileWatch()
        self._loaders: list[BalancedLoader | StreamLoader] = []
        self._count = StepCount()
        self._models = PreparedModels(self._count)
        self._crew: Crew | None = None
        self._service: Service | None = None  # on a rank without data
        self._link = RunLink(self._open)
        ends = self._link.backward_done, self._link.reduced
        self._backward = Backward(*ends, first_order=True)
        self._loss_backward = Backward(*ends, first_order=False)
        self._closed = False
        self._stats = RunningStats()

    def prepare(
        self, *parts: Any, weighting: Weighting = "output", stream: StreamKind | None = None
    ) -> Any:
        """Return models and loaders (mostly one of each) ready for balanced steps.

        A model comes back as the same object with hooks on it, so that ``state_dict`` keys stay;
        a plain one is wrapped into DDP where there are several processes. The loader comes back
        as one whose every iteration is a global step, and whose length is their number.
        Collective: every rank prepares the same things in the same order.

        Args:
            parts: modules (plain or DDP) and ``DataLoader``s, in any order. Several loaders are
                used in turn, one loop after the other.
            weighting: ``"output"`` weights the gradient at the model's output, with no change to
                the loss. ``"loss"`` leaves it to ``weight(loss)``, for gradient penalties, for
                outputs fed back into the model, and for losses that bypass the output.
            stream: who reads what of an ``IterableDataset``: ``"same"``, all ranks read all of it,
                or ``"sharded"``, each rank reads samples of its own. See ``StreamLoader``.

        Returns:
            The prepared parts in the order given; a single one by itself.

        Raises:
            ValueError: a part cannot be balanced; the message says why and what to do instead.
        """
        self._check_open()
        arguments.check_weighting(weighting, self._weighting)
        self._weighting = weighting
        self._join()
        models = {i: p for i, p in enumerate(parts) if isinstance(p, nn.Module)}
        for module in models.values():
            check_unprepared(wrapped_model(module))
        done = [self._prepare_model(part) if i in models else part for i, part in enumerate(parts)]
        done = [
            part if i in models else self._prepare_loader(part, stream)
            for i, part in enumerate(done)
        ]
        return done[0] if len(done) == 1 else tuple(done)

    def prepare_eval(
        self, loader: DataLoader[Any], *, lockstep: bool | None = None
    ) -> EvalLoader | ServerEval | FabricLoader:
        """Return ``loader`` for evaluation, each sample once over all ranks, shared out by speed.

        Collective, as a loop over what it returns is: every rank makes it. Any number of loaders.

        Args:
            loader: over a data set with a length; ``batch_size`` is the most of one forward.
            lockstep: whether all ranks make as many forwards, as where a forward is a collective.
                None finds out from the prepared models: FSDP, or a DDP that broadcasts buffers.
                Say True for such a model that was not prepared.

        Raises:
            ValueError: the loader cannot be shared out; the message says what to do instead.
        """
        self._check_open()
        crew, models = self._join(), self._models
        at_once = lambda: is_lockstep(lockstep, (model.module for model in models))  # noqa: E731
        made = evaluation(wrapped_loader(loader), crew, self._link, lockstep=at_once)
        return as_wrapped(loader, made)

    def profile(
        self,
        closure: Closure,
        *,
        sizes: Sequence[int] | None = None,
        repeats: int = 3,
        samples: Sequence[Any] | None = None,
        through: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
        path: str | Path | None = None,
    ) -> ClusterProfile:
        """Measure forward and backward on every rank by itself, and begin the run balanced by it.

        Collective, between ``prepare`` and the first loop. Parameters, gradients, buffers, random
        states and the loader's position stay as they are.

        Args:
            closure: from a batch, as ``collate_fn`` made it, to its loss; with no other effects.
            sizes: batch sizes to measure. None takes some twelve, up to four equal shares.
            repeats: runs of each size that count, after one that warms up.
            samples: from the data set, repeated to the sizes; None takes its first ones.
            through: runs the backward of a loss, as in ``Step.backward``.
            path: rank 0's file, which keeps the profile. Workers that it has, by host and device,
                with this model are not measured anew.

        Raises:
            ValueError: an argument is out of range, or a forward is a collective.
            RuntimeError: a rank failed, or this is no time for it.
        """
        self._check_open()
        arguments.check_trains(is_server=self._service is not None)
        asked = Request(closure, sizes, repeats, samples, through, path)
        parts = self._models, self._loaders, self._link, self._watch
        profiler = Profiler(*parts, side=self._side, memory=self._runtime.memory)
        return profiler.profile(asked, lambda: self._job(cuts=True))

    def weight(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` weighted for this forward: the explicit form of what is exact.

        Args:
            loss: this rank's loss, a mean over the units of the forward just made (or their
                sum, with ``loss_reduction="sum"``).

        Raises:
            ValueError: the model was prepared to be weighted at its output, so that this would
                weight twice.
        """
        arguments.check_weighed_by_hand(self._weighting)
        weight = self._link.weight()
        if weight is None:
            return loss
        scaled, _ = scale(loss, weight, self._loss_backward)
        return scaled  # type: ignore[no-any-return]

    def mean(self, value: float | torch.Tensor, count: float | None = None) -> float:
        """Return the mean of ``value`` over the samples, or other units, of all ranks.

        The mean of per-rank means is wrong for uneven batches. Collective, and reads the value
        from the device: for every step's log on a GPU, that is a synchronisation.

        Args:
            value: this rank's mean over its own samples. Where the balancer has another ``unit``
                and ``count`` is None: over its own units, as the loss is.
            count: how many those were, at least 0; None is this rank's samples, or units, of the
                training step under way.

        Raises:
            RuntimeError: outside of a training step, as in an evaluation, without ``count``.
        """
        return mean_over(self._side, self._link, value, count)

    def average_buffers(self) -> None:
        """Give every rank one set of BatchNorm's running statistics: the mean over all ranks.

        Weighted by the samples that they stand for: those since the last call where each rank
        keeps its own (``DDP(model, broadcast_buffers=False)``); those of the newest step where
        DDP hands rank 0's to all at each forward, which is its default and loses the others'.
        Other buffers stay as they are. Collective; call it before an evaluation or a checkpoint.

        It repairs what evaluation reads. In training, local BatchNorm depends on the split still.

        Raises:
            RuntimeError: before ``prepare``, or after ``close``.
        """
        self._stats.average_over(self._side, self._link, self._models)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Local batch sizes of the step under way, one per rank; empty before the first.

        Those of full steps: the short last batch of an epoch has fewer.
        """
        plan = self._link.plan()
        return () if plan is None else plan.batch_size

    @property
    def num_samples(self) -> int:
        """This rank's samples of the training step under way; 0 outside of one.

        Also 0 where the rank got a stand-in of weight 0, because the short last step of an epoch
        had fewer samples than ranks.
        """
        return self._link.num_samples or 0

    @property
    def is_server(self) -> bool:
        """Whether this rank holds no data and only sums gradients, as ``Network`` says.

        Collective before ``prepare``.
        """
        return self._join().is_server

    @property
    def workers(self) -> torch.distributed.ProcessGroup | None:
        """The workers' process group, for a DDP or collectives of your own; None is the default.

        On a server, one of that server alone: nobody waits there. Collective before ``prepare``.
        """
        return self._join().workers

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt about speeds and memory, by host and device; on rank 0 alone.

        Not collective; of plain values and tensors. Other ranks, which do not plan, have nothing.
        """
        return self._link.estimates.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the run with what ``state`` says about its hosts and devices; rank 0's counts.

        Raises:
            ValueError: ``state`` is broken or something else, or the first loop has begun.
        """
        self._link.restore(Estimates.read(state))

    def close(self) -> None:
        """End the run on this rank: stop the exchange, the loader's workers, the event file."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._say_goodbye)
        with ExitStack() as parts:  # the last one first, and each whatever another raises
            if self._crew is not None:
                parts.callback(self._crew.close)
            parts.callback(self._watch.close)
            if self._reduction is not None:
                parts.callback(self._reduction.close)
            for part in self._models:
                parts.callback(part.release)
            parts.callback(self._link.close)
            for loader in self._loaders:
                parts.callback(loader.close)
        self._models.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lost = self._link.loss_behind(error)
        self.close()
        if lost is not None and lost is not error:
            raise lost from error

    def _say_goodbye(self) -> None:
        """Close at the end of a script that never did; if a collective broke, say who broke it."""
        self._link.loss_behind(getattr(sys, "last_value", None))  # the exchange logs what it learns
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("The balancer was closed. Make a new `Balancer` for a new run.")

    @property
    def _side(self) -> SideGroup | Alone | None:
        """The workers' side group, between ``prepare`` and ``close``."""
        return None if self._crew is None or self._closed else self._crew.side

    def _join(self) -> Crew:
        """Return all ranks, with whom roles are agreed on at first."""
        if self._crew is None:
            self._check_open()
            self._crew = Crew(self._process_group, self._network)
            if self._crew.is_server:
                self._service = Service(self._crew, self._runtime)
                atexit.register(self._say_goodbye)  # here, as no run is ever opened
        return self._crew

    def _prepare_model(self, given: nn.Module) -> nn.Module:
        crew, module = self._join(), wrapped_model(given)
        if crew.world_size > 1:
            warn_batch_norm(module)
            check_compiled(module)
        outer = with_ddp(module, crew.world_size, crew.workers)
        self_test(outer)
        crew.side.join(outer)
        if self._network is not None and crew.world_size > 1:
            self._reduction = self._reduction or Reduction(self._network, crew, self._runtime)
            self._reduction.attach(ddp_of(outer))
        if self._service is not None:
            self._service.reduction = self._reduction
            return still_wrapped(given, outer)
        weighting = self._weighting or "output"
        model = BalancedModel(outer, self._backward, self._link.weight, weighting, self._watch)
        self._watch.before_steps(model.place)
        model.time_buffers(self._link)
        model.time_nested(
            self._link, self._backward if weighting == "output" else self._loss_backward
        )
        self._models.append(model)
        return still_wrapped(given, outer)

    def _prepare_loader(
        self, given: Any, stream: StreamKind | None
    ) -> BalancedLoader | StreamLoader | ServerLoader | FabricLoader:
        crew, loader = self._join(), wrapped_loader(given)
        check_is_loader(loader)
        size = agreed_batch_size(self._global_batch_size, loader, crew.num_workers)
        self._global_batch_size = size
        prepared = balanced_loader(
            loader,
            stream,
            side=crew.side,
            global_batch_size=size,
            link=self._link,
            no_sync=self._models.no_sync,
            counter=self._counter,
            count=self._count,
            beside=self._loaders,
        )
        if self._service is not None:
            self._loaders.append(prepared)
            return ServerLoader(prepared, self._service.loop)
        prepared.attempts = Replay(
            self._models,
            self._link,
            layout=layout_by(loader, prepared),
            loss_reduction=self._loss_reduction,
            smallest=lambda: self._job(cuts=True).smallest,
            probe_up_to=size if self._bounds.max == "probe" else None,
        )
        self._loaders.append(prepared)
        self._job(cuts=True)  # what no kind of loop can split is refused here
        return as_wrapped(given, prepared)

    def _job(self, *, cuts: bool, min_forwards: int = 1) -> Job:
        assert self._side is not None
        assert self._global_batch_size is not None
        return job_of(
            self._models,
            self._loaders,
            self._bounds,
            world_size=self._side.world_size,
            global_batch_size=self._global_batch_size,
            cuts=cuts,
            min_forwards=min_forwards,
        )

    def _open(self, listeners: list[Callable[[Plan], None]], *, cuts: bool) -> Run:
        """Open the run at its first step, when devices and the kind of loop are known."""
        assert self._crew is not None
        assert self._loaders
        if not self._models:
            raise RuntimeError("The loader runs without a model: `prepare` the model too.")
        world_size = self._crew.num_workers
        wrapping = Wrapping.of(self._models, self._bounds, world_size=world_size, cuts=cuts)
        settings = RunSettings(
            policy=self._policy,
            job=self._job(cuts=cuts, min_forwards=wrapping.min_forwards),
            num_steps=num_steps_of(self._loaders[0]),
            loss_reduction=self._loss_reduction,
            runtime=self._runtime,
            device=device_of(self._models[0].module),
            wrapping=wrapping,
            run_dir=self._run_dir,
            estimates=self._link.estimates,
            watch=self._watch,
            counts_units=self._counter is not None,
            has_streams=any(isinstance(loader, StreamLoader) for loader in self._loaders),
            least_workers=lambda: self._link.least_workers,
            reduction=self._reduction,
        )
        self._watch.on_cuda = settings.device.type == "cuda"
        by_size = world_size > 1 and self._bounds.vary == "size"
        self._watch.varies = by_size and not isinstance(self._policy, Equal | Fixed)
        atexit.register(self._say_goodbye)
        return Run(settings, self._crew, listeners)
