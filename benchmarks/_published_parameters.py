"""What a published script has trained: its parameters before the first step, and at the end."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Parameters:
    """Writes down all parameters, before the first step and at the end of training.

    Args:
        path: where rank 0 writes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.before: list[torch.Tensor] = []
        self.done = False

    def open(self) -> None:
        """Begin."""
        register_optimizer_step_pre_hook(self.steps)
        dist_any: Any = dist
        ends = dist.destroy_process_group

        def destroy_process_group(*args: Any, **kwargs: Any) -> None:
            self.end()
            ends(*args, **kwargs)

        for module in (dist_any, dist_any.distributed_c10d):
            module.destroy_process_group = destroy_process_group
        atexit.register(self.end)

    def steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep those of an optimizer from before its first step."""
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self.before += self.of(optimizer)

    def of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return copies; of a parameter that is sharded, the whole. Collective then."""
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in parameters]
        return [one.detach().clone() for one in whole]

    def end(self) -> None:
        """Write, once."""
        if self.done or not self.optimizers:
            return
        self.done = True
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        after = [one for optimizer in self.optimizers.values() for one in self.of(optimizer)]
        if rank == 0:
            torch.save({"before": self.before, "after": after}, self.path)
