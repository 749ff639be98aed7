"""What a balancer was asked for, and the models and loaders that were prepared with it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from .._exchange._mailbox import Mailbox
from .._planner import Bounds, Cost, Job
from .._run._machine_reader import ClueReader
from .._torch_clock import clock_of
from .._types import IntArray
from ..exceptions import invalid
from ..policies import AbstractPolicy, Equal
from ._data._prepare import ServerLoader, agreed_batch_size, balanced_loader, check_is_loader
from ._data._protocols import Collectives, LoaderSession
from ._data._step import StepCount
from ._data.compare._content import read_cost
from ._data.deal._stream_deal import StreamKind
from ._data.loaders._base import AbstractStepLoader, StepContext
from ._data.loaders._stream import StreamLoader
from ._data.order._drawing import draws_at_random
from ._exchange._crew import Crew
from ._exchange._side_group import Alone, SideGroup
from ._exchange._startup import roll_call
from ._fabric import FabricLoader, as_wrapped, still_wrapped, wrapped_loader, wrapped_model
from ._memory import Retries, layout_by
from ._model._compiled import check_compiled, ddp_of
from ._model._models import (
    BalancedModel,
    PreparedModels,
    Weighting,
    device_of,
    has_local_batch_norm,
    warn_batch_norm,
    with_ddp,
)
from ._model._self_test import self_test
from ._model._units import Unit, counter_of, warned_of_tokens
from ._model._weighting import Backward
from ._options import Runtime
from ._script_checks import Checks
from ._step._reporter import CompileWatch
from ._step._tracker import StepTracker
from ._unequal_links import open_reduction, service_of

if TYPE_CHECKING:
    from ..network._torch._network_settings import Network
    from ..network._torch._reduction import Reduction
    from ..network._torch._serving import Service


class LoaderMail:
    """One loader's way to the other ranks, over the side channel, once the run is open.

    A prefetching thread of the user's may ask for a batch while the main thread is in a
    collective: so this is none. Peers, which get the very same batches, do as their first.

    Args:
        mailbox: sends messages of this rank to the others, once it is connected.
        side: the ranks.
        number: of the loader among those of its balancer.
    """

    def __init__(
        self, mailbox: Callable[[], Mailbox], side: SideGroup | Alone, number: int
    ) -> None:
        self.rank = side.rank
        self.world_size = side.world_size
        self._mailbox = mailbox
        self._side = side
        self._number = number
        self._num_rounds = 0

    def check(self) -> None:
        """Raise if a worker was lost."""
        self._mailbox().check()

    def share(self, key: tuple[int, int], ints: IntArray | None) -> IntArray:
        """Return on every rank the integers that rank 0 calls it with; None on the others.

        Args:
            key: which round, later ones with larger numbers, and which message of it.
            ints: the integers.
        """
        agreed = self._mailbox().share((self._number, *key), ints)
        return agreed if self._side.peers is None else self._side.peers.share(agreed)

    def gather(self, numbers: list[int]) -> Callable[[], list[list[int]]]:
        """Send ``numbers``, as many on every rank, and return what waits for those of all."""
        # Under a name of its own: blocks of an order have numbers of theirs.
        self._num_rounds += 1
        return self._mailbox().gather((~self._number, self._num_rounds, 0), numbers)


_LOGGER = logging.getLogger("evenstep")


@dataclass(eq=False, slots=True, kw_only=True)
class PreparedRun:
    """All that a run is made of, and who is there to run it.

    Attributes:
        policy, bounds, runtime, network, loss_reduction, unit: as in ``Balancer``.
        cost: what samples cost; None where they are counted.
        global_batch_size: likewise; the loader's own size decides where it is None.
        weighting: of all models; None before the first.
        count: steps of the run so far.
        watch: notices what is compiled.
        clues: makes what reads what else may explain waiting.
        steps: of the run.
        loaders: that were prepared, for training.
        models: that were prepared.
        counter: counts the units in a batch; None where they are samples.
        backward: is notified of every backward.
        checks: look for mistakes in the script.
        crew: all ranks; None before they are agreed on.
        reduction: sums gradients by shares; None is plain all-reduce.
        service: what a rank without data does; None on workers.
        hints_unit: whether a model whose loss counts tokens is still to be warned of.
    """

    policy: AbstractPolicy[Any]
    bounds: Bounds
    runtime: Runtime
    network: Network | None
    loss_reduction: str
    unit: Unit
    global_batch_size: int | None
    cost: Cost | None = None
    weighting: Weighting | None = None
    count: StepCount = field(default_factory=StepCount)
    watch: CompileWatch = field(default_factory=CompileWatch)
    clues: Callable[..., ClueReader] = ClueReader
    steps: StepTracker = field(default_factory=StepTracker)
    loaders: list[AbstractStepLoader] = field(default_factory=list)
    crew: Crew | None = None
    reduction: Reduction | None = None
    service: Service | None = None
    hints_unit: bool = True
    models: PreparedModels = field(init=False)
    counter: Callable[[Any], float] | None = field(init=False)
    backward: Backward = field(init=False)
    checks: Checks = field(init=False)
    _counts_samples: bool = field(default=False, init=False)  # whatever they cost

    def __post_init__(self) -> None:
        self.models = PreparedModels()
        modules = self.models.modules
        self.counter = counter_of(self.unit, loss_reduction=self.loss_reduction, modules=modules)
        self.backward = Backward(self.steps)
        self.checks = Checks(self.models, self.steps, self.backward, self.count)
        self.steps.looks = self.checks

    @property
    def side(self) -> SideGroup | Alone | None:
        """The workers' side group; None before ``join``."""
        return None if self.crew is None else self.crew.side

    @property
    def at_random(self) -> bool | None:
        """Whether no rank's samples differ but by chance; None if the loss is not checked."""
        if not self.runtime.checks_loss:
            return None
        return all(one.costs is None and draws_at_random(one.sampler) for one in self.loaders)

    @property
    def is_first(self) -> bool:
        """Whether the plans that count are made on this rank: on rank 0."""
        if (crew := self.crew) is not None:
            peers = crew.side.peers
            return crew.rank == 0 and not (peers is not None and peers.follows)
        if not (dist.is_available() and dist.is_initialized()):
            return True
        return dist.get_rank(self.runtime.process_group) == 0

    def join(self) -> Crew:
        """Return all ranks, with whom roles are agreed on at first."""
        if self.crew is None:
            roll_call(self.runtime.process_group, self.runtime.hang_s)
            self.crew = Crew(self.runtime.process_group, self.network)
            if self.crew.is_server:
                self.service = service_of(self.crew, self.runtime)
        return self.crew

    def add_model(self, given: nn.Module, crew: Crew) -> nn.Module:
        """Return a model with the balancer's hooks on it, in a DDP if it averages in no way."""
        module = wrapped_model(given)
        if crew.world_size > 1:
            warn_batch_norm(module)
            check_compiled(module)
            if self.hints_unit and self.unit == "samples" and self.loss_reduction == "mean":
                self.hints_unit = not warned_of_tokens(module)
        outer = with_ddp(module, crew.world_size, crew.workers)
        self_test(outer)
        clock_of(device_of(module))  # or its steps cannot be timed
        crew.side.join(outer)
        if self.network is not None and crew.world_size > 1:
            if self.reduction is None:
                self.reduction = open_reduction(self.network, crew, self.runtime)
            self.reduction.attach(ddp_of(outer))
        if self.service is not None:
            self.service.reduction = self.reduction
            return still_wrapped(given, outer)
        weighs = self.weighting != "loss"
        model = BalancedModel(
            outer,
            self.backward,
            self.steps,
            self.watch,
            number=len(self.models),
            weighs=weighs,
            draws_by_sample=self.runtime.sample_seed is not None,
        )
        self.watch.before_steps(model.surrounds, model.place)
        self.models.append(model)
        is_unequal = crew.num_workers > 1 and not isinstance(self.policy, Equal)
        self.checks.add(model, is_unequal=weighs and is_unequal)
        return still_wrapped(given, outer)

    def add_loader(
        self,
        given: Any,
        stream: StreamKind | None,
        crew: Crew,
        *,
        session: LoaderSession,
        mailbox: Callable[[], Mailbox],
    ) -> AbstractStepLoader | ServerLoader | FabricLoader:
        """Return a loader whose every iteration is a global step."""
        loader = wrapped_loader(given)
        check_is_loader(loader)
        size = agreed_batch_size(self.global_batch_size, loader, crew.num_workers)
        self.global_batch_size = size
        context = StepContext(
            ranks=LoaderMail(mailbox, crew.side, len(self.loaders)),
            session=session,
            global_batch_size=size,
            no_sync=self.models.no_sync,
            count=self.count,
            counter=self.counter,
            cost=self._cost_of(loader, crew.side),
            equal_forwards=self._has_equal_forwards,
            sample_seed=self.runtime.sample_seed,
            number=len(self.loaders),
            check_sizes=self._check_sizes,
        )
        prepared = balanced_loader(loader, stream, context, beside=self.loaders)
        if self.service is not None:
            self.loaders.append(prepared)
            return ServerLoader(prepared, self.service.loop)
        prepared.attempts = Retries(
            self.models,
            self.steps,
            layout=layout_by(loader, prepared),
            loss_reduction=self.loss_reduction,
            smallest=lambda: self.job(cuts=True).smallest,
            probe_up_to=size if self.bounds.max == "probe" else None,
        )
        self.loaders.append(prepared)
        self.job(cuts=True)  # what no kind of loop can split is refused here
        return as_wrapped(given, prepared)

    def _has_equal_forwards(self) -> bool:
        """Return whether all ranks are to make as many forwards: FSDP2's are collectives.

        Not where each has one fixed number of samples, or needs several.
        """
        is_sharded = any(model.shards is not None for model in self.models)
        return is_sharded and self.bounds.vary == "size" and self.job(cuts=True).smallest == 1

    def _cost_of(self, loader: DataLoader[Any], ranks: Collectives) -> Cost | None:
        """Return what the samples of a loader cost; None where samples are counted.

        So they are in all loaders if those of the first one cost the same: then a plan by cost says
        nothing else, and takes more time.
        """
        cost = read_cost(self.cost, loader, ranks)
        if cost is not None and not self.loaders:
            self._counts_samples = bool(ranks.share(cost.is_one_for_all))
            if self._counts_samples and ranks.rank == 0:
                _LOGGER.info("All samples cost the same by `Balancer(cost=...)`: they are counted.")
        return None if self._counts_samples else cost

    def job(self, *, cuts: bool) -> Job:
        """Return what is planned for, with the smallest local batches that the models can take.

        Local BatchNorm cannot normalise a single sample, and a single sample costs a compiled
        model a graph of its own: both get at least two, where the global batch has them.

        Args:
            cuts: whether the loop takes micro-batches.

        Raises:
            ValueError: no split is possible. Here on every rank, rather than later on rank 0.
        """
        assert self.crew is not None
        assert self.global_batch_size is not None
        world_size, tail_size = self.crew.side.world_size, self.loaders[0].tail_batch_size or 0
        has_norm = any(has_local_batch_norm(model.module) for model in self.models)
        smallest, tail_smallest = 1, 0
        if self.cost is not None and has_norm and world_size > 1:
            raise invalid(
                "Balancer(cost=...)",
                "be left out for local BatchNorm, which needs two samples on each rank",
                "a model with it",
                "Use GroupNorm or SyncBatchNorm, or leave `cost` out.",
            )
        if world_size > 1 and (has_norm or any(model.compiles for model in self.models)):
            smallest = min(2, self.global_batch_size // world_size)
            tail_smallest = 2 if (has_norm and tail_size) or tail_size >= 2 * world_size else 0
        if world_size > 1 and has_norm:
            _check_full_steps(self.loaders[-1])
            _check_tail(tail_size, world_size, self.bounds)
        job = Job(
            world_size=world_size,
            global_batch_size=self.global_batch_size,
            tail_size=tail_size,
            bounds=self.bounds,
            smallest=smallest,
            tail_smallest=tail_smallest,
            cuts=cuts,
            varies=not all(loader.is_fixed for loader in self.loaders),
        )
        job.cluster(job.caps())
        return job

    def _check_sizes(self, sizes: IntArray, whole: bool) -> None:
        """Raise if the batches of a batch sampler differ, and something takes only one size.

        Args:
            sizes: of the steps of an epoch.
            whole: whether each rank has a single forward in a step.
        """
        assert self.crew is not None
        bounds, world_size = self.bounds, self.crew.num_workers
        if (sizes == self.global_batch_size).all():
            return
        caps = bounds.caps(world_size)
        has_norm = world_size > 1 and any(has_local_batch_norm(one.module) for one in self.models)
        for is_so, where, rule, got, remedy in (
            (
                bounds != replace(bounds, granularity=1, vary="size")
                or bounds.min not in ("auto", 0, 1),
                "Bounds(min=..., granularity=..., vary=...)",
                "be left out, as no split of a small batch might keep them",
                bounds,
                "Use `Bounds(max=...)` alone.",
            ),
            (
                has_norm,
                "Balancer.prepare(model)",
                "have no local BatchNorm, which needs two samples on each rank",
                "a model with it",
                "Use GroupNorm or SyncBatchNorm.",
            ),
            (
                whole and caps is not None and sizes.max() > caps.sum(),
                "Bounds(max=...)",
                f"add up to the largest batch, of {sizes.max()} samples",
                bounds.max,
                "Raise it, yield smaller batches, or loop over `loader.steps()`, where it bounds a "
                "micro-batch.",
            ),
        ):
            if is_so:
                differ = "with a `batch_sampler` whose batches are not all of the global batch size"
                raise invalid(where, f"{rule}, {differ}", got, remedy)


def _check_full_steps(loader: AbstractStepLoader) -> None:
    """Raise for a model with local BatchNorm on a stream whose steps may have too few samples."""
    if isinstance(loader, StreamLoader) and not loader.drop_last:
        raise invalid(
            "Balancer.prepare(loader, stream=...)",
            "have full steps only, for the model's BatchNorm",
            "a stream that may end with fewer than 2 samples for a rank",
            "Set `DataLoader(drop_last=True)`, or use GroupNorm.",
        )


def _check_tail(tail_size: int, world_size: int, bounds: Bounds) -> None:
    """Raise if the short last step is too short for a model with local BatchNorm.

    It needs 2 samples on every rank, and a stand-in would enter its statistics. Where every
    forward has the same number, it needs one whole forward on every rank, and no single sample
    in one.
    """
    fixed = bounds.forward_size if bounds.vary == "count" else None
    each = max(2, fixed or 2)
    lonely = fixed is not None and tail_size % fixed == 1
    if 0 < tail_size < each * world_size or (tail_size and lonely):
        raise invalid(
            "Balancer.prepare(loader)",
            f"have {each} samples for each of {world_size} ranks in its last step, and none by "
            "itself, for the model's BatchNorm",
            tail_size,
            "Set `DataLoader(drop_last=True)`, or use GroupNorm.",
        )
