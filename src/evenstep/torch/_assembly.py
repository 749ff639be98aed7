"""How a balancer is put together: who is there, what was prepared, when the run opens."""

from __future__ import annotations

import abc
import atexit
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..planner import Bounds, Job, Plan
from ..policies import AbstractPolicy, Equal, Fixed
from ._clock import clock_of
from ._connection import Connection
from ._data._prepare import (
    agreed_batch_size,
    balanced_loader,
    check_is_loader,
    num_steps_of,
)
from ._data._step import StepCount
from ._data.deal._stream_terms import StreamKind
from ._data.loaders._base import AbstractStepLoader, StepContext
from ._data.loaders._server import ServerLoader
from ._data.loaders._stream import StreamLoader
from ._exchange._crew import Crew
from ._exchange._roll_call import roll_call
from ._exchange._startup import Alone, SideGroup
from ._fabric import FabricLoader, as_wrapped, still_wrapped, wrapped_loader, wrapped_model
from ._job import job_of
from ._loader_mail import LoaderMail
from ._memory._layout import layout_by
from ._memory._replay import Replay
from ._model._compile_watch import CompileWatch
from ._model._compiled import check_compiled, ddp_of
from ._model._models import BalancedModel, Weighting, device_of, warn_batch_norm, with_ddp
from ._model._prepared import PreparedModels
from ._model._self_test import self_test
from ._model._weighting import Backward
from ._model._wrapping import Wrapping
from ._options import Runtime
from ._session import Session
from ._torch_run import TorchRun, TorchRunSettings
from ._unequal_links import open_reduction, service_of

if TYPE_CHECKING:
    from ..network._torch._network_settings import Network
    from ..network._torch._reduction import Reduction
    from ..network._torch._serving import Service


class Assembly(abc.ABC):
    """What a balancer does before its first step: it joins, prepares, connects and opens."""

    _policy: AbstractPolicy[Any]
    _bounds: Bounds
    _runtime: Runtime
    _process_group: torch.distributed.ProcessGroup | None
    _network: Network | None
    _global_batch_size: int | None
    _loss_reduction: str
    _counter: Callable[[Any], float] | None
    _weighting: Weighting | None
    _reduction: Reduction | None
    _models: PreparedModels
    _watch: CompileWatch
    _loaders: list[AbstractStepLoader]
    _count: StepCount
    _crew: Crew | None
    _connection: Connection | None
    _service: Service | None
    _session: Session
    _backward: Backward
    _loss_backward: Backward
    _closed: bool

    @abc.abstractmethod
    def _say_goodbye(self) -> None:
        """Close at the end of a script that never did."""

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
            roll_call(self._process_group, self._runtime.hang_s)
            self._crew = Crew(self._process_group, self._network)
            if self._crew.is_server:
                self._service = service_of(self._crew, self._runtime)
                atexit.register(self._say_goodbye)  # here, as no run is ever opened
        return self._crew

    def _prepare_model(self, given: nn.Module) -> nn.Module:
        crew, module = self._join(), wrapped_model(given)
        if crew.world_size > 1:
            warn_batch_norm(module)
            check_compiled(module)
        outer = with_ddp(module, crew.world_size, crew.workers)
        self_test(outer)
        clock_of(device_of(module))  # or its steps cannot be timed
        crew.side.join(outer)
        if self._network is not None and crew.world_size > 1:
            if self._reduction is None:
                self._reduction = open_reduction(self._network, crew, self._runtime)
            self._reduction.attach(ddp_of(outer))
        if self._service is not None:
            self._service.reduction = self._reduction
            return still_wrapped(given, outer)
        weighting = self._weighting or "output"
        number = len(self._models)
        model = BalancedModel(
            outer, self._backward, self._session, weighting, self._watch, number=number
        )
        self._watch.before_steps(model.place)
        model.time_buffers(self._session)
        model.time_nested(
            self._session, self._backward if weighting == "output" else self._loss_backward
        )
        self._models.append(model)
        return still_wrapped(given, outer)

    def _prepare_loader(
        self, given: Any, stream: StreamKind | None
    ) -> AbstractStepLoader | ServerLoader | FabricLoader:
        crew, loader = self._join(), wrapped_loader(given)
        check_is_loader(loader)
        size = agreed_batch_size(self._global_batch_size, loader, crew.num_workers)
        self._global_batch_size = size
        context = StepContext(
            ranks=LoaderMail(self._session, crew.side, len(self._loaders)),
            session=self._session,
            global_batch_size=size,
            no_sync=self._models.no_sync,
            count=self._count,
            counter=self._counter,
        )
        prepared = balanced_loader(loader, stream, context, beside=self._loaders)
        if self._service is not None:
            self._loaders.append(prepared)
            return ServerLoader(prepared, self._service.loop)
        prepared.attempts = Replay(
            self._models,
            self._session,
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

    def _connect(self, parts: Iterable[Any]) -> None:
        """Connect with the others, once there is a model; collective.

        Args:
            parts: models among them.
        """
        models = [part for part in parts if isinstance(part, nn.Module)]
        if self._connection is not None or not models:
            return
        atexit.register(self._say_goodbye)
        device = device_of(models[0])
        self._connection = Connection(self._join(), device, self._runtime)
        self._session.exchange = self._connection.exchange

    def _open(self, listeners: list[Callable[[Plan], None]], *, cuts: bool) -> TorchRun:
        """Open the run at its first step, when devices and the kind of loop are known."""
        assert self._crew is not None
        assert self._loaders
        if not self._models:
            raise RuntimeError("The loader runs without a model: `prepare` the model too.")
        world_size = self._crew.num_workers
        wrapping = Wrapping.of(self._models, self._bounds, world_size=world_size, cuts=cuts)
        settings = TorchRunSettings(
            policy=self._policy,
            job=self._job(cuts=cuts, min_forwards=wrapping.min_forwards),
            num_steps=num_steps_of(self._loaders[0]),
            loss_reduction=self._loss_reduction,
            runtime=self._runtime,
            device=device_of(self._models[0].module),
            wrapping=wrapping,
            estimates=self._session.estimates,
            watch=self._watch,
            counts_units=self._counter is not None,
            has_streams=any(isinstance(loader, StreamLoader) for loader in self._loaders),
            least_workers=lambda: self._session.least_workers,
            reduction=self._reduction,
            versions=self._models.version,
        )
        self._watch.on_cuda = settings.device.type == "cuda"
        by_size = world_size > 1 and self._bounds.vary == "size"
        self._watch.varies = by_size and not isinstance(self._policy, Equal | Fixed)
        self._connect(model.module for model in self._models)  # with servers: in their first loop
        assert self._connection is not None
        return TorchRun(settings, self._crew, self._connection, listeners)
