"""The public face: three lines in a training script."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast, final, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from .._planner import Bounds, Cost
from .._run._estimates import Estimates
from .._run._runtime import checked_policy, checked_reduction
from ..exceptions import invalid
from ..policies import AbstractPolicy
from . import _arguments as arguments
from ._data._prepare import ServerEval
from ._data.compare._content import read_cost
from ._data.deal._stream_deal import StreamKind
from ._data.loaders._balanced import BalancedLoader
from ._data.loaders._eval import EvalLoader, Lockstep
from ._exchange._crew import OFF, SWITCH, Crew, is_off
from ._exchange._side_group import Alone, SideGroup
from ._fabric import as_wrapped, unwrapped, wrapped_loader
from ._means import average_statistics, mean_over
from ._model._models import (
    Weighting,
    check_unprepared,
    device_of,
    forward_is_collective,
)
from ._model._units import Unit
from ._model._weighting import check_unweighted, scale
from ._off import PlainRun
from ._options import Runtime
from ._prepare_check import check_content, check_eval, check_prepared, settings_facts
from ._prepared_run import PreparedRun
from ._session import Session
from ._unequal_links import checked_network

T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:
    from ..network._torch._network_settings import Network

    # There is no object of these: loaders have what they wrap by `__getattr__`. But scripts use the
    # name of their own loader again, `model, loader = balancer.prepare(model, loader)`, which only
    # a type that is both allows.
    class PreparedLoader(BalancedLoader, DataLoader[T_co]):  # type: ignore[misc, override]
        """A ``DataLoader`` whose every iteration is a global step."""

    class PreparedEval(EvalLoader, DataLoader[T_co]):  # type: ignore[misc, override]
        """A ``DataLoader`` of this rank's part of an evaluation."""

else:
    PreparedLoader, PreparedEval = BalancedLoader, EvalLoader


M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


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
    would take. The policy sizes each rank's part of it from the times measured so far. The
    gradient is the mean over that global batch, for any sizes. With one process, or without a
    process group, the script runs unchanged.

    Right for losses that are means (or, with ``loss_reduction="sum"``, sums) over samples or other
    units. Local batch normalization sees uneven batches, and a warning says so. Contrastive losses
    over a rank's own batch are not sums over samples, and no weight makes them exact.
    ``check_loss`` finds out what a loss is.

    Args:
        global_batch_size: samples per optimizer step over all workers. None is the loader's
            ``batch_size`` times the number of workers, as in plain training. With a
            ``batch_sampler``, the size of its batches; about their mean where they differ.
        policy: decides the sizes: a name (``"auto"``, ``"equal"``, ``"dynamic-batching"``,
            ``"dbs"``, ``"lb-bsp-2018"``, ``"lb-bsp-2020"``, ``"lbb"``), ``"module:Class"``, or a
            policy.
        unit: what the loss is a mean over: ``"samples"``; ``"tokens"``, the targets other than
            -100 in batches of Hugging Face's collators, for models of transformers; or a function
            from a batch, as the loop gets it, to the number that the loss divides by, such as the
            number of valid targets or the sum of their class weights. A forward is then weighted
            by its units. Plans still count samples.
        loss_reduction: what your loss does over the units of a forward, ``"mean"`` or ``"sum"``.
            The tensors do not show which. A sum stays as in plain DDP, which averages over ranks:
            the sum over the global batch divided by the number of ranks.
        bounds: limits on every worker's samples.
        runtime: the ranks, heartbeats, deadlines, the progress line, how memory is read, and the
            seed for random numbers by sample.
        network: sums gradients by shares that suit the links, and names ranks that hold no data
            and only sum; None is plain all-reduce.
        cost: what samples cost, if they differ: lengths by index, the name of a column, or a
            ``Cost``. Each step's samples are then assigned by cost and by the ranks' learnt
            speeds; None counts samples.

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
        network: Network | None = None,
        cost: Any = None,
    ) -> None:
        if is_off():
            self.__class__ = _plain_kind(type(self))  # a `__new__` would hide the signature
        arguments.check_values(bounds, runtime)
        policy = checked_policy(policy)
        self._parts = PreparedRun(
            policy=policy,
            bounds=bounds,
            runtime=runtime,
            network=checked_network(network),
            loss_reduction=checked_reduction(loss_reduction),
            unit=unit,
            global_batch_size=arguments.checked_size(global_batch_size),
            cost=arguments.checked_cost(cost, policy=policy, bounds=bounds, runtime=runtime),
        )
        settings = settings_facts(
            runtime,
            unit,
            global_batch_size=global_batch_size,
            policy=policy,
            loss_reduction=loss_reduction,
            bounds=bounds,
            network=network,
            cost=repr(self._parts.cost),
        )
        self._check = partial(
            check_prepared, settings=settings, global_batch_size=global_batch_size
        )
        self._session = Session(self._parts)
        self._num_averaged = 0  # samples of this rank that `average_buffers` dealt with
        self._pid, self._closed = os.getpid(), False

    @overload
    def prepare(
        self,
        model: M,
        loader: DataLoader[T],
        /,
        *,
        weighting: Weighting = "output",
        stream: StreamKind | None = None,
    ) -> tuple[M, PreparedLoader[T]]: ...
    @overload
    def prepare(self, model: M, /, *, weighting: Weighting = "output") -> M: ...
    @overload
    def prepare(
        self, loader: DataLoader[T], /, *, stream: StreamKind | None = None
    ) -> PreparedLoader[T]: ...
    @overload
    def prepare(
        self, *parts: Any, weighting: Weighting = "output", stream: StreamKind | None = None
    ) -> Any: ...
    def prepare(
        self, *parts: Any, weighting: Weighting = "output", stream: StreamKind | None = None
    ) -> Any:
        """Return models and loaders (mostly one of each) ready for balanced steps.

        A model in DDP or FSDP2 comes back as the same object with hooks on it, so its
        ``state_dict`` keys stay. A plain model is wrapped into DDP if there are several processes.
        A loader comes back as one whose iterations are global steps, and whose length is their
        number. Collective: every rank prepares the same things in the same order, which is
        compared.

        Args:
            parts: modules (plain, DDP or FSDP2) and ``DataLoader``s, in any order. Several loaders
                are used in turn, one loop after the other.
            weighting: ``"output"`` weights the gradient at the model's output, with no change to
                the loss. With ``"loss"`` you call ``weight(loss)``: for gradient penalties, and
                for losses that bypass the output.
            stream: which rank reads what of an ``IterableDataset``: with ``"same"`` all ranks read
                all of it, with ``"sharded"`` each rank reads its own samples.

        Returns:
            The prepared parts in the order given; a single part without a tuple. To a type checker
            a model keeps its class, although a plain one may be in a DDP now, and a loader has the
            types of both ``DataLoader`` and a balanced loader.

        Raises:
            ValueError: a part cannot be balanced, or ranks differ; the message says what to do.
        """
        self._check_open()
        made = self._parts
        arguments.check_weighting(weighting, made.weighting)
        made.weighting = weighting
        crew = self._join()
        inner = [unwrapped(part) for part in parts]
        self._check(crew.side, inner, weighting=weighting, stream=stream)
        modules = [part for part in inner if isinstance(part, nn.Module)]
        if crew.num_servers == 0 and modules and self._session.exchange is None:
            self._session.connect(device_of(modules[0]))  # with servers: in the first loop
        if stream is None:
            check_content(crew.side, inner)
        for module in modules:
            check_unprepared(module)
        models = {
            at: made.add_model(part, crew)
            for at, part in enumerate(parts)
            if isinstance(part, nn.Module)
        }
        mailbox = lambda: self._session.mailbox  # noqa: E731
        done = [
            models[at]
            if at in models
            else made.add_loader(part, stream, crew, session=self._session, mailbox=mailbox)
            for at, part in enumerate(parts)
        ]
        return done[0] if len(done) == 1 else tuple(done)

    def prepare_eval(
        self, loader: DataLoader[T], *, lockstep: Lockstep | None = None, cost: Any = None
    ) -> PreparedEval[T]:
        """Return ``loader`` for evaluation: each sample once over all ranks, shared out by speed.

        Collective, and so is a loop over the loader that it returns. Takes any number of loaders,
        one call each.

        Args:
            loader: over a data set with a length; ``batch_size`` is the most samples of a forward.
            lockstep: whether all ranks make equally many forwards, because a forward is a
                collective. None finds out from the prepared models: FSDP, or a DDP that broadcasts
                buffers. Give True for such a model that was not prepared. With ``"steps"`` each
                rank makes one forward for every batch of a plain evaluation, of any size and at
                least one sample, so that a loop may have collectives after each; this counts
                samples.
            cost: what its samples cost, as in ``Balancer(cost=...)``; they are then shared out by
                cost. None takes the balancer's own cost, if it names a column that this data set
                has; otherwise samples are counted.

        Raises:
            ValueError: the loader cannot be shared out; the message says what to do instead.
        """
        crew, own, models = self._join(), wrapped_loader(loader), self._parts.models

        def at_once() -> Lockstep:
            return forward_is_collective(models.modules()) if lockstep is None else lockstep

        cost = Cost.given(cost)
        arguments.check_lockstep(lockstep, cost)
        ours = self._parts.cost if lockstep != "steps" else None
        if cost is None and ours is not None and ours.suits(own.dataset):
            cost = ours
        check_eval(crew.side, own, lockstep=at_once(), cost=cost)
        if isinstance(own, DataLoader):  # anything else is refused below
            cost = read_cost(cost, own, crew.side)
        made = (
            ServerEval(own)
            if crew.is_server
            else EvalLoader(
                own,
                ranks=crew.side,
                session=self._session,
                lockstep=at_once,
                cost=cost,
            )
        )
        return cast("PreparedEval[T]", as_wrapped(loader, made))

    def weight(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` weighted for this forward, for models prepared with ``weighting="loss"``.

        Args:
            loss: this rank's loss, a mean over the units of the forward just made (or their
                sum, with ``loss_reduction="sum"``).

        Raises:
            ValueError: the model was prepared to be weighted at its output, a term of the loss is
                weighted already, so that this would weight twice, or the step has had no forward
                of a prepared model.
        """
        arguments.check_weighed_by_hand(self._parts.weighting)
        check_unweighted(loss)
        use = self._parts.steps.use_of_loss()
        if use is None:
            arguments.check_forwarded(self._side, begun=self._parts.steps.plan is not None)
            return loss
        scaled, _ = scale(loss, use, self._parts.backward, first_order=False)
        return scaled  # type: ignore[no-any-return]

    def step(self, batch: Any) -> AbstractContextManager[None]:
        """Return a context in which forwards belong to ``batch``: the explicit form.

        evenstep matches a forward to its batch by the inputs: by their memory, or by their size.
        If a loop fetches ahead and copies batches before the forward, the match can be ambiguous.
        The backward then raises an error that names this form.

        Usage:
            for batch, copy in fetched_ahead(loader):
                with balancer.step(batch):
                    loss = loss_fn(model(copy))
                loss.backward()

        Args:
            batch: the batch that the loader handed out, or tensors of it.

        Raises:
            ValueError: the loader did not hand it out, or it has been freed.
            RuntimeError: no batch was handed out yet.
        """
        return self._parts.steps.named(batch)

    def mean(self, value: float | torch.Tensor, count: float | None = None) -> float:
        """Return the mean of ``value`` over the samples, or other units, of all ranks.

        The mean of per-rank means is wrong for uneven batches. Collective. It reads the value from
        the device, so each call is a synchronization on a GPU.

        Args:
            value: this rank's mean over its own samples; or over its own units, as the loss is, if
                the balancer has another ``unit`` and ``count`` is None.
            count: number of these samples or units, at least 0; None takes those of the training
                step under way.

        Raises:
            RuntimeError: outside of a training step, as in an evaluation, without ``count``.
        """
        return mean_over(self._side, self._parts.steps, value, count)

    def pause(self) -> AbstractContextManager[None]:
        """Return a context in which this rank works alone, for as long as it takes.

        Use it if the others wait for one rank, as for an evaluation or an upload on rank 0 alone.
        Without it, a rank that keeps others waiting for ``Runtime(hang_s=...)`` counts as hanging,
        and the run ends. A rank that stops or dies inside the context is still noticed.

        Usage:
            if rank == 0:
                with balancer.pause():
                    evaluate(model)
            dist.barrier()
        """
        exchange = self._session.exchange
        return nullcontext() if exchange is None else exchange.pause()

    def average_buffers(self) -> None:
        """Give all ranks the same running statistics of BatchNorm: the mean over all ranks.

        The mean is weighted by samples. If each rank keeps its own statistics
        (``DDP(model, broadcast_buffers=False)``), these are the samples since the last call. With
        DDP's default, each forward replaces all statistics by rank 0's, and these are the samples
        of the newest step. Other buffers stay. Collective; call it before an evaluation or a
        checkpoint. In training, local BatchNorm still depends on the split.

        Raises:
            RuntimeError: before ``prepare``, or after ``close``.
        """
        self._num_averaged = average_statistics(
            self._side, self._parts.steps, self._parts.models, self._num_averaged
        )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Planned local batch sizes of the step under way, one per rank; empty before the first.

        They are those of full steps: the short last batch of an epoch has fewer samples.
        """
        plan = self._parts.steps.plan
        return () if plan is None else plan.batch_size

    @property
    def num_samples(self) -> int:
        """This rank's samples of the training step under way; 0 outside of one.

        Also 0 if the rank got a stand-in of weight 0, as in a short last step with fewer samples
        than ranks.
        """
        return self._parts.steps.num_samples or 0

    @property
    def is_server(self) -> bool:
        """Whether this rank holds no data and only sums gradients, as ``Network`` says.

        Collective before ``prepare``.
        """
        return self._join().is_server

    @property
    def workers(self) -> torch.distributed.ProcessGroup | None:
        """The workers' process group, for your own DDP or collectives; None is the default group.

        On a server it is a group of this server alone, so collectives do not wait. Collective
        before ``prepare``.
        """
        return self._join().workers

    def state_dict(self) -> dict[str, Any]:
        """Return what rank 0 learnt about speeds and memory, by host and device; {} on other ranks.

        Not collective.
        """
        return self._session.estimates.packed() if self._parts.is_first else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the run with what ``state`` says about its hosts and devices; only rank 0's counts.

        Raises:
            ValueError: ``state`` is not an intact one, or the first loop has begun.
        """
        has_none = state == {} and not self._parts.is_first
        self._session.restore(Estimates() if has_none else Estimates.read(state))

    def close(self) -> None:
        """End the run on this rank: its connections, loader workers, event file. Not in a child."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self._say_goodbye)
        parts = self._parts
        with ExitStack() as last_first:  # and each whatever another raises
            for part in (parts.crew, parts.watch, parts.reduction):
                if part is not None:
                    last_first.callback(part.close)
            for model in parts.models:
                last_first.callback(model.release)
            last_first.callback(self._session.close)
            for loader in parts.loaders:
                last_first.callback(loader.close)
        parts.checks.close()
        parts.models.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lost = self._end(error)
        if lost is not None and lost is not error:
            raise lost from error

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("The balancer was closed. Make a new `Balancer` for a new run.")

    @property
    def _side(self) -> SideGroup | Alone | None:
        """The workers' side group, between ``prepare`` and ``close``."""
        return None if self._closed else self._parts.side

    def _join(self) -> Crew:
        """Return all ranks, with whom roles are agreed on at first."""
        self._check_open()
        is_first = self._parts.crew is None
        crew = self._parts.join()
        if is_first:  # whatever this rank does in the run, and wherever it connects
            atexit.register(self._say_goodbye)
        return crew

    def _say_goodbye(self) -> None:
        """Close at the end of a script that never did. The exchange logs who broke a collective."""
        self._end(getattr(sys, "last_value", None))

    def _end(self, error: BaseException | None) -> Exception | None:
        """Close, and return the loss of a worker that is behind ``error``."""
        if self._pid != os.getpid():
            return None
        try:
            return self._session.loss_behind(error)
        finally:
            self.close()


@final
class PlainBalancer(Balancer):
    """What ``Balancer(...)`` makes where the environment says ``EVENSTEP=off``.

    Models get no hooks, and ranks no connections but torch's. A loader hands out an equal part of
    the same global batches, in one micro-batch a step. Weights, bounds, policy, cost and network
    are left out.
    """

    _run: PlainRun | None = None

    def prepare(
        self, *parts: Any, weighting: Weighting = "output", stream: StreamKind | None = None
    ) -> Any:
        """Return models in DDP and loaders of equal parts; Fabric's stay Fabric's."""
        self._check_open()
        arguments.check_weighting(weighting, self._parts.weighting)
        self._parts.weighting = weighting
        self._join()
        self._run = run = self._run or PlainRun(self._parts)
        done = [
            run.add_model(part) if isinstance(part, nn.Module) else run.add_loader(part, stream)
            for part in parts
        ]
        return done[0] if len(done) == 1 else tuple(done)

    def prepare_eval(
        self, loader: Any, *, lockstep: Lockstep | None = None, cost: Any = None
    ) -> Any:
        """Return ``loader`` for evaluation, each sample once over all ranks, in equal shares."""
        modules = () if self._run is None else self._run.modules
        at_once = forward_is_collective(modules) if lockstep is None else lockstep
        return Balancer.prepare_eval(self, loader, lockstep=at_once, cost=cost)

    def step(self, batch: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def mean(self, value: float | torch.Tensor, count: float | None = None) -> float:
        """Return the mean over all ranks, as ``Balancer.mean`` does. Collective."""
        if count is None and self._run is not None:
            count = self._run.num_units
        return Balancer.mean(self, value, count)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Equal ones; empty before the first step."""
        plan = None if self._run is None else self._run.plan
        return () if plan is None else plan.batch_size

    @property
    def num_samples(self) -> int:
        """This rank's samples of the training step under way; 0 outside of one."""
        step = None if self._run is None else self._run.step
        return 0 if step is None else step.num_samples


def _plain_kind(kind: type[Balancer]) -> type[Balancer]:
    """Return the plain kind of balancer; raise for a class of the user's, which has none."""
    if kind is not Balancer:
        raise invalid(
            SWITCH, "be left out with a subclass of `Balancer`", OFF, "Use `Balancer` itself."
        )
    return PlainBalancer
