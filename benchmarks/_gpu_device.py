"""A device of this machine: which one is meant, and what figures depend on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import evenstep

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Effort:
    """How much is run; ``small``: models and sizes too."""

    small: bool


class NotRun(Exception):
    """This machine lacks what a cell needs; the message says what."""


def device_of(asked: str) -> torch.device:
    """Return the device that was asked for; ``"auto"`` is the accelerator, or the CPU.

    Raises:
        SystemExit: there is no such device.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if found is None else found.type
    if asked not in ("auto", "cpu", kind):
        raise SystemExit(f"`--device {asked}`: torch sees {kind} here. Use `--device auto`.")
    return CPU if "cpu" in (asked, kind) else torch.device(kind, 0)


def num_cards(device: torch.device) -> int:
    """Return how many devices of this kind there are; 0 for a CPU."""
    return 0 if device.type == "cpu" else torch.accelerator.device_count()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": middle, "q1": low, "q3": high, "num": len(values)}


def has_doubles(device: torch.device) -> bool:
    """Return whether the device computes in float64."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).sum().item()
    except (RuntimeError, TypeError):  # of MPS
        return False
    return True


def facts(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on: no host's name, and no path."""
    return {
        "device": device.type,
        "devices": [_card(device.type, index) for index in range(num_cards(device))],
        "driver": _driver(device.type),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _nccl() if device.type == "cuda" else None,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "evenstep": evenstep.__version__,
        "commit": _commit(),
    }


def _card(kind: str, index: int) -> dict[str, Any]:
    """Return what torch says of an accelerator; not every kind says all of it."""
    module: Any = getattr(torch, kind)
    if not hasattr(module, "get_device_properties"):
        return {"name": kind}
    told = module.get_device_properties(index)
    names = "name", "total_memory", "major", "minor", "multi_processor_count", "gcnArchName"
    return {name: getattr(told, name) for name in names if hasattr(told, name)}


def _driver(kind: str) -> str | None:
    """Return the driver's version, where something tells it."""
    if kind == "xpu":
        return str(torch.xpu.get_device_properties(0).driver_version)
    if kind != "cuda":
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (_said(query) or "").split("\n")[0] or None


def _nccl() -> str | None:
    with suppress(Exception):  # a build without it
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return None


def _cpu() -> str:
    """Return the model's name, where Linux tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str | None:
    """Return the commit of this tree, marked where something in it was changed."""
    return _said(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"])


def _said(words: list[str]) -> str | None:
    """Return what a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
