"""The profile of all workers: each measures by itself, then all hear of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..._planner import Job
from ..._private_torch import original_of
from ..._run._estimates import Estimates
from ...exceptions import invalid
from ...timemodels import ClusterProfile, Profile
from .._exchange._startup import Alone, SideGroup, WorkerFacts
from .._memory._kept import kept_random
from .._memory._samples import batch_maker, first_samples
from .._memory_reader import memory_of
from .._model._compiled import ddp_of
from .._model._models import device_of, has_local_batch_norm
from .._model._prepared import PreparedModels
from .._parts import Parts
from .._session import Session
from .._step._clock import clock_of
from ._file import found_in, read_profile, write_profile
from ._sizes import sizes_of
from ._start import learnt_from
from ._trial import Request, Trial


@dataclass(frozen=True, slots=True)
class Profiler:
    """Measures the models that were prepared, on samples of the first loader.

    Attributes:
        parts: what was prepared.
        session: begins with the profile what it opens.
    """

    parts: Parts
    session: Session

    def profile(self, asked: Request) -> ClusterProfile:
        """Return the profile of all workers, measured or from the file. Collective.

        Args:
            asked: what is to be measured.

        Raises:
            ValueError: an argument or a model cannot be profiled.
            RuntimeError: it is too early or too late, or a rank failed; all ranks raise then.
        """
        side, models = self.parts.side, self.parts.models
        if side is None or not models or not self.parts.loaders:
            raise RuntimeError("Nothing to profile: `prepare` the model and the loader first.")
        if self.parts.steps.plan is not None:
            raise RuntimeError("The run has begun: call `profile` before the first loop.")
        _check_models(models, side)
        job = self.parts.job(cuts=True)
        sizes = self._sizes(asked, job, side.rank)
        path = None if asked.path is None else Path(asked.path)
        model = ", ".join(_described(module) for module in models.modules())
        device = device_of(models[0].module)
        workers = side.collect(WorkerFacts.here(device, lag=0).identity)
        known = read_profile(path, side)
        at = found_in(known, workers, model=model, sizes=asked.sizes)[side.rank]
        mine: tuple[Profile, int, int] | Exception
        if known is not None and at >= 0:
            mine = known.profiles[at], int(known.capacity_bytes[at]), int(known.out_of_memory[at])
        else:
            mine = self._measured(asked, job, sizes, device)
        rows = _agreed(mine, side)
        profiles, capacity, failed = zip(*rows, strict=True)
        profile = ClusterProfile(
            workers, profiles, capacity_bytes=capacity, out_of_memory=failed, model=model
        )
        if side.rank == 0:
            self._keep(profile, job, path)
        return profile

    def _keep(self, profile: ClusterProfile, job: Job, path: Path | None) -> None:
        """Have the run begin with it, unless a state was loaded, and write it for the next."""
        if path is not None:
            write_profile(path, profile)
        before = self.session.estimates
        if before.learnt is None or before.of_profile:
            bytes_ = sum(p.nbytes for p in self.parts.models.parameters() if p.requires_grad)
            learnt = learnt_from(profile, job, state_bytes=2 * bytes_)  # as much as Adam's
            self.session.restore(Estimates(profile.workers, learnt, of_profile=True))

    def _sizes(self, asked: Request, job: Job, rank: int) -> list[int]:
        has_norm = any(has_local_batch_norm(module) for module in self.parts.models.modules())
        return sizes_of(asked.sizes, job, rank=rank, smallest=max(job.smallest, 1 + has_norm))

    def _measured(
        self, asked: Request, job: Job, sizes: Sequence[int], device: torch.device
    ) -> tuple[Profile, int, int] | Exception:
        """Return this rank's profile, or what went wrong, for the others to hear of."""
        loader = self.parts.loaders[0]
        try:
            with kept_random():
                share = -(-job.global_batch_size // job.world_size)
                samples = asked.samples
                samples = first_samples(loader, share) if samples is None else samples
                found = Trial(
                    asked,
                    self.parts,
                    batch_maker(loader, samples),
                    job.bounds.forward_size if job.bounds.vary == "count" else None,
                    clock_of(device),
                    self.parts.runtime.memory or memory_of(device),
                ).measure(sizes)
            return found.profile(), found.capacity_bytes, found.out_of_memory
        except Exception as error:
            return error


def _check_models(models: PreparedModels, side: SideGroup | Alone) -> None:
    """Raise where no rank can be measured alone, or not without a trace."""
    layers = (layer for module in models.modules() for layer in module.modules())
    waits = "" if models.can_run_again else "a model sharded by FSDP"
    if side.peers is not None:
        waits = "a model in parts on several ranks"
    elif side.world_size > 1 and any(isinstance(x, nn.SyncBatchNorm) for x in layers):
        waits = "a model with SyncBatchNorm"
    if waits:
        raise invalid(
            "Balancer.profile(...)",
            "be used with models that a rank can run alone, plain or in DDP",
            f"{waits}, whose forward is a collective",
            "Leave it out: the first steps of training measure too.",
        )
    if any(model.ddp is not None and model.ddp.static_graph for model in models):
        raise invalid(
            "Balancer.profile(...)",
            "be used with a DDP that learns its graph in training",
            "`DDP(model, static_graph=True)`, which would learn it from the profile and then "
            "average no gradient",
            "Leave `static_graph` out, or the profile: the first steps measure too.",
        )


def _agreed(
    mine: tuple[Profile, int, int] | Exception, side: SideGroup | Alone
) -> list[tuple[Profile, int, int]]:
    """Return every rank's row, or raise on all ranks what went wrong on one."""
    failed = isinstance(mine, Exception)
    rows = side.collect(f"{type(mine).__name__}: {mine}" if failed else mine)
    if isinstance(mine, Exception):
        raise mine
    for rank, row in enumerate(rows):
        if isinstance(row, str):
            raise RuntimeError(f"Rank {rank} could not be profiled. It ended with a {row}")
    return rows


def _described(module: nn.Module) -> str:
    """Return what tells a model from another, in words."""
    ddp = ddp_of(module)
    inner = original_of(module if ddp is None else ddp.module)
    count = sum(parameter.numel() for parameter in inner.parameters())
    kinds = {str(parameter.dtype).removeprefix("torch.") for parameter in inner.parameters()}
    return f"{type(inner).__name__} of {count} parameters ({', '.join(sorted(kinds))})"
