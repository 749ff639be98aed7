"""Facts that torch knows: versions, the device of a rank, its threads."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from .. import __version__
from .._doctor import (
    CgroupLimits,
    Device,
    RankFacts,
    gpus_of_driver,
    read_cpu,
    read_network,
    read_room,
    read_variables,
)
from .._exchange._threads import network_name


def device_for(local_rank: int) -> torch.device:
    """Return the device that a rank has in most scripts: the card of its number, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def facts_of(
    rank: int,
    device: torch.device,
    limits: CgroupLimits,
    *,
    environ: Mapping[str, str],
    port: int,
    root: Path = Path("/"),
) -> RankFacts:
    """Return all that this rank says of itself.

    Args:
        rank: the own one.
        device: what it computes on.
        limits: of its control groups.
        environ: of its process.
        port: where it listens while links are measured.
        root: of the file system that is read.
    """
    return RankFacts(
        rank=rank,
        host=platform.node(),
        machine=network_name(),
        versions=_versions(device),
        device=_described(device, root),
        cpu=read_cpu(torch.get_num_threads(), limits, root),
        room=read_room(limits, root),
        network=read_network(environ, environ.get("MASTER_ADDR", "localhost"), root, port),
        variables=read_variables(environ),
        unused_gpus=0 if torch.cuda.is_available() else gpus_of_driver(root),
    )


def _versions(device: torch.device) -> dict[str, str]:
    found = {
        "evenstep": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "numpy": np.__version__,
    }
    if device.type == "cuda":
        found["CUDA"] = torch.version.cuda or "none"
        if torch.distributed.is_nccl_available():
            nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            found["NCCL"] = ".".join(map(str, nccl))
    return found


def _described(device: torch.device, root: Path) -> Device:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Device("cuda", str(found.name), str(getattr(found, "uuid", "")))
    return Device("cpu", _cpu_model(root))


def _cpu_model(root: Path) -> str:
    try:
        lines = (root / "proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
