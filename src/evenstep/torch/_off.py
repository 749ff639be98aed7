"""``EVENSTEP=off``: the script trains as plain DDP does, and every call of it goes on working."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import _arguments as arguments
from ._balancer import Balancer
from ._data._prepare import check_is_loader
from ._data.deal._stream_terms import StreamKind
from ._data.loaders._eval import Lockstep
from ._data.loaders._unbalanced import PlainLoader, plainly_sharded
from ._fabric import as_wrapped, wrapped_loader, wrapped_model
from ._model._fsdp import fsdp_layers
from ._model._models import Weighting, forward_is_collective, with_ddp


@final
class PlainBalancer(Balancer):
    """What ``Balancer(...)`` makes where the environment says ``EVENSTEP=off``.

    No hooks, no plans, no connections, no threads. A plain model is wrapped into DDP where there
    are several processes; a loader that is not sharded yet gets a ``DistributedSampler``. The
    global batch is the loader's ``batch_size`` times the number of processes.
    """

    _modules: tuple[nn.Module, ...] = ()
    _sizes: tuple[int, ...] = ()
    _num_samples = 0
    _batch: Any = None

    def prepare(
        self, *parts: Any, weighting: Weighting = "output", stream: StreamKind | None = None
    ) -> Any:
        """Return models in DDP and loaders of this rank's part; Fabric's stay Fabric's."""
        self._check_open()
        self._join()
        arguments.check_weighting(weighting, self._parts.weighting)
        done = [
            self._model(part) if isinstance(part, nn.Module) else self._loader(part, stream)
            for part in parts
        ]
        return done[0] if len(done) == 1 else tuple(done)

    def prepare_eval(
        self, loader: Any, *, lockstep: Lockstep | None = None, cost: Any = None
    ) -> Any:
        """Return ``loader`` for evaluation, each sample once over all ranks, in equal shares."""
        at_once = forward_is_collective(self._modules) if lockstep is None else lockstep
        return Balancer.prepare_eval(self, loader, lockstep=at_once)  # in equal shares

    def profile(self, *args: Any, **settings: Any) -> Any:
        """Measure nothing, and return None."""

    def weight(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` as it is."""
        return loss

    def step(self, batch: Any) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def mean(self, value: float | torch.Tensor, count: float | None = None) -> float:
        """Return the mean over all ranks, as ``Balancer.mean`` does. Collective."""
        counter = self._parts.counter
        if count is None and self._num_samples:
            count = self._num_samples if counter is None else counter(self._batch)
        return Balancer.mean(self, value, count)

    def average_buffers(self) -> None:
        """Leave buffers to DDP."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The loader's own batch size on every rank; empty before the first step."""
        return self._sizes

    @property
    def num_samples(self) -> int:
        """This rank's samples of the step under way; 0 outside of one."""
        return self._num_samples

    def _model(self, module: nn.Module) -> nn.Module:
        parts = list(module.modules())
        is_wrapped = any(isinstance(part, DistributedDataParallel) for part in parts)
        is_wrapped = is_wrapped or bool(fsdp_layers(module)) or wrapped_model(module) is not module
        crew = self._join()
        outer = module if is_wrapped else with_ddp(module, crew.world_size, crew.workers)
        self._modules += (outer,)
        return outer

    def _loader(self, given: Any, stream: StreamKind | None) -> Any:
        loader = wrapped_loader(given)
        check_is_loader(loader)
        side = self._join().side
        own, tells = plainly_sharded(loader, side, stream)

        def on_batch(batch: Any, count: int | None) -> None:
            self._batch, self._num_samples = batch, count or 0
            if count is not None:
                self._sizes = self._sizes or (own.batch_size or count,) * side.world_size

        return as_wrapped(given, PlainLoader(own, side.world_size, tells=tells, on_batch=on_batch))
