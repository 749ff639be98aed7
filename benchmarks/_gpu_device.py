"""A device of this machine: work on it timed by events, its memory, and what it is."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import evenstep
from evenstep._torch_clock import clock_of

CPU = torch.device("cpu")


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


def timed(
    work: Callable[[], object],
    device: torch.device,
    num_times: int,
    after: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the device's seconds of each call of ``work``, of those the CPU's on a CPU.

    Nothing waits for the device before the last call has been launched.

    Args:
        work: what is timed.
        device: where it computes.
        num_times: how often it is called.
        after: follows each call, and is not timed.
    """
    clock = clock_of(device)
    synchronize(device)
    marks = []
    for _ in range(num_times):
        begin = clock.mark()
        work()
        marks.append((begin, clock.mark()))
        after()
    synchronize(device)
    return [clock.seconds(begin, end) or 0.0 for begin, end in marks]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": middle, "q1": low, "q3": high, "num": len(values)}


def reset_peak(device: torch.device) -> None:
    """Start a new peak of memory, where torch counts it."""
    if device.type != "cpu":
        with suppress(RuntimeError, NotImplementedError):
            torch.accelerator.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return the most that tensors took since; 0 where torch does not count it."""
    if device.type != "cpu":
        with suppress(RuntimeError, NotImplementedError):
            return int(torch.accelerator.max_memory_allocated(device))
    return 0


def has_doubles(device: torch.device) -> bool:
    """Return whether the device computes in float64."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).sum().item()
    except (RuntimeError, TypeError):  # of MPS
        return False
    return True


def precisions(device: torch.device) -> tuple[str, ...]:
    """Return the names of what models are timed in."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32", "bfloat16"
    return ("float32", "bfloat16") if device.type == "xpu" else ("float32",)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward in this precision; a graph can be captured in it."""
    wanted = precision == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted, cache_enabled=False)


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
    if torch.version.hip:
        path = Path("/sys/module/amdgpu/version")
        return path.read_text("ascii").strip() if path.exists() else None
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
