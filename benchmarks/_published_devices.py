"""What each process of a published script loads first: CPUs for its accelerators, and a record.

``published_watch`` and ``published_recipes`` write a ``sitecustomize`` that imports this; nothing
else does. A script that asks for CUDA and NCCL gets CPUs and gloo. Generators are seeded. All
losses whose backward is taken, and a checksum of the parameters after each step, are written down
bit by bit; the parameters themselves, before the first step and at the end, where it is asked for.
The first forward after a backward sleeps for what a device would take, on one rank for longer, or
by the rows that it is given.
"""

from __future__ import annotations

import json
import os
import random
import time
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

SETTINGS = "EVENSTEP_PUBLISHED"


def on_cpu(device: Any) -> Any:
    """Return the CPU for whatever names another device; what names none stays."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return torch.device("cpu")
    return torch.device("cpu") if isinstance(device, torch.device) else device


def moved(before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose first argument or ``device`` may be another device than it says."""

    def to(first: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return before(first, *args, **kwargs)

    return to


def as_it_is(thing: Any, *_: Any, **__: Any) -> Any:
    """Return what is on the CPU already."""
    return thing


def filled(before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``to_empty`` that leaves no memory as it was found: a script may not set it all."""

    def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        before(self, device=on_cpu(device), recurse=recurse)
        with torch.no_grad():
            for parameter in self.parameters():
                local = getattr(parameter, "to_local", lambda p=parameter: p)()
                nn.init.normal_(local, std=0.02)
        return self

    return to_empty


def pretend(device: str, num_devices: int) -> None:
    """Have torch's calls for accelerators answered by CPUs."""
    torch_any: Any = torch
    for kind in (torch.Tensor, nn.Module):
        kind_any: Any = kind
        kind_any.to, kind_any.cuda = moved(kind.to), as_it_is
    torch_any.nn.Module.to_empty = filled(nn.Module.to_empty)
    torch_any.Tensor.pin_memory = as_it_is
    torch_any.tensor = moved(torch.tensor)
    torch_any.cuda.set_device = lambda *_: None
    torch_any.cuda.device_count = lambda: num_devices
    accelerator = torch_any.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: num_devices
    accelerator.current_accelerator = lambda *_, **__: torch.device(device)
    accelerator.set_device_index = accelerator.device_index = lambda *_: None
    accelerator.current_device_index = lambda: 0
    accelerator.current_stream = lambda *_: SimpleNamespace(is_capturing=lambda: False)
    loads = torch.load

    def load(*args: Any, **kwargs: Any) -> Any:
        return loads(*args, **kwargs | {"map_location": "cpu"})

    torch_any.load = load


def pretend_groups() -> None:
    """Have process groups opened with gloo, and DDP wrapped without numbers of devices."""
    dist_any: Any = dist
    opens = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return opens("gloo", *args, **kwargs)

    for module in (dist_any, dist_any.distributed_c10d):
        module.init_process_group = init_process_group
        module.get_default_backend_for_device = lambda _: "gloo"
    ddp: Any = DistributedDataParallel
    made = ddp.__init__

    def __init__(self: Any, module: nn.Module, *_: Any, **kwargs: Any) -> None:
        for name in ("device_ids", "output_device"):
            kwargs.pop(name, None)
        made(self, module, **kwargs)

    ddp.__init__ = __init__


class Record:
    """Writes down what is computed, and takes the time of the device that is not there.

    Args:
        path: where to write; each rank's number is put after it.
        base_s: for which each forward of a training sleeps.
        slow: the rank that sleeps for longer; less than 0 is none.
        more_s: for how much longer.
        row_s: for which it sleeps for each row of its first tensor besides, by rank; empty is not.
    """

    def __init__(
        self, path: str, *, base_s: float, slow: int, more_s: float, row_s: Sequence[float] = ()
    ) -> None:
        self.path, self.base_s, self.slow, self.more_s = path, base_s, slow, more_s
        self.row_s = row_s
        self.sleeps = True

    def open(self) -> None:
        """Begin."""
        tensor: Any = torch.Tensor
        backward = tensor.backward

        def recorded(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self.sleeps = True
            self.write("loss", loss.detach().double().sum().item().hex())
            backward(loss, *args, **kwargs)

        tensor.backward = recorded
        register_module_forward_hook(self.forward)
        register_optimizer_step_post_hook(self.stepped)

    def forward(self, module: nn.Module, given: tuple[Any, ...], _: Any) -> None:
        """Sleep inside of the forward: once the first layer is through."""
        wrapper = isinstance(module, (DistributedDataParallel, FSDPModule))
        if wrapper or not (self.sleeps and torch.is_grad_enabled() and dist.is_initialized()):
            return
        rows = [len(each) for each in given if isinstance(each, torch.Tensor) and each.ndim]
        if self.row_s and not rows:
            return  # a model that is given names: one of its parts is given the tensor
        if module.training and any(True for _ in module.parameters()):
            self.sleeps = False
            rank = dist.get_rank()
            more_s = self.row_s[rank] * rows[0] if self.row_s else 0.0
            time.sleep(self.base_s + more_s + (self.more_s if rank == self.slow else 0.0))

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Write a checksum of the parameters."""
        total = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                local = getattr(parameter, "to_local", lambda p=parameter: p)()
                total = zlib.crc32(local.detach().contiguous().numpy().tobytes(), total)
        self.write("step", f"{total:08x}")

    def write(self, what: str, text: str) -> None:
        """Write a line with the time, in seconds of this process."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        with open(f"{self.path}.{rank}", "a", encoding="ascii") as file:
            file.write(f"{what} {text} {time.perf_counter():.6f}\n")


def begin(settings: dict[str, Any]) -> None:
    """Prepare this process for a script."""
    torch_any: Any = torch
    if settings.get("double"):
        torch.set_default_dtype(torch.float64)
        torch_any.float32 = torch.float64  # scripts name it for layers, and check parameters
    if settings.get("no_dropout"):
        torch_any.nn.functional.dropout = as_it_is
    if "parameters" in settings:
        from benchmarks._published_parameters import Parameters

        Parameters(settings["parameters"]).open()
    pretend(settings["device"], settings["num_devices"])
    pretend_groups()
    torch.manual_seed(1)
    random.seed(1)
    Record(
        settings["record"],
        base_s=settings["base_s"],
        slow=settings["slow"],
        more_s=settings["more_s"],
        row_s=settings.get("row_s", ()),
    ).open()
    if settings["stubs"]:
        from benchmarks._published_stubs import put

        put(settings["stubs"])


if SETTINGS in os.environ:
    begin(json.loads(os.environ[SETTINGS]))
