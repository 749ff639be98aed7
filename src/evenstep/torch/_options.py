"""How a balanced run is watched: by which ranks, heartbeats, deadlines, the progress line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from .._run._machine_reader import MachineReader
from .._run._runtime import AbstractRuntime
from ..claims import Hybrid
from ..exceptions import invalid


class MemoryReader(Protocol):
    """Reads one worker's memory. Anything with these three methods will do."""

    def capacity_bytes(self) -> int:
        """Return what the device offers to this process."""

    def peak_bytes(self) -> int:
        """Return the most that was in use since the last ``reset``."""

    def reset(self) -> None:
        """Start a new peak."""


class CudaMemory:
    """Reads the peak of PyTorch's caching allocator, and the memory that the GPU offers to it.

    The peak counts *allocated* bytes, not reserved ones, because a cache grows to any size. Memory
    of other processes is not offered. No method waits for the device.

    A step's own peak requires that torch's peak statistics are reset at each step, and a process
    has one set of them. So ``torch.cuda.max_memory_allocated()`` is the peak since the current step
    began. ``highest_bytes`` is the peak of the run.

    Usage:
        memory = CudaMemory("cuda:0")
        balancer = Balancer(runtime=Runtime(memory=memory))
        ...
        print(memory.highest_bytes())

    Args:
        device: the CUDA device.
        cuda: where torch's statistics are read: for tests, anything with its four functions.
    """

    def __init__(self, device: torch.device | str, *, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._highest = 0
        free, _ = cuda.mem_get_info(device)
        self._capacity = int(free + cuda.memory_reserved(device))

    def capacity_bytes(self) -> int:
        """Return what was free at the start, and what this process held of it already."""
        return self._capacity

    def peak_bytes(self) -> int:
        """Return the most that tensors took up since the last ``reset``."""
        return int(self._cuda.max_memory_allocated(self._device))

    def reset(self) -> None:
        """Start a new peak."""
        self._highest = self.highest_bytes()
        self._cuda.reset_peak_memory_stats(self._device)

    def highest_bytes(self) -> int:
        """Return the most that tensors took up since this object was made, over all resets."""
        return max(self._highest, self.peak_bytes())


@dataclass(frozen=True, slots=True)
class Runtime(AbstractRuntime):
    """How a run is watched, connected and recorded; the defaults suit most runs.

    Args:
        deadline_s: seconds without a heartbeat after which a worker counts as lost and the others
            end with an error that names it. It has to be longer than a process may hold Python's
            lock, as some compilers do.
        heartbeat_s: seconds between two heartbeats, positive and at most a third of
            ``deadline_s``.
        hang_s: seconds for which a worker may make the others wait while its process lives; then
            it counts as hanging. A pause that all workers share does not count. It has to be
            longer than the longest step, and than what one worker does alone outside of
            ``Balancer.pause()``. The default is one minute less than NCCL's ten, after which NCCL
            ends a process without naming the late rank. None is no limit.
        line_every: steps between two progress lines of rank 0 on standard error; None is silence.
        freshness: ``"newest"`` never waits for a device: the newest complete measurement
            decides, which is the last step on a CPU and often the one before on CUDA.
            ``"exact"`` waits for the device at every step, so that step k always decides k + 1.
        run_dir: folder for ``events.jsonl``, written by rank 0; None writes none.
        hooks: callables that get every event, on rank 0, each in a thread of its own: for
            ``wandb`` or a dashboard. If one raises or is slow, it loses events, and training
            continues.
        address: host name or address of rank 0 that every other rank can reach, or one of its
            network interfaces, such as ``"ib0"``. None finds one: the loopback if all ranks share
            a network, else the interface in ``GLOO_SOCKET_IFNAME``, else ``MASTER_ADDR`` and the
            host's own names.
        ports: the TCP port at which rank 0 listens for the other ranks, or a ``range`` of which it
            takes the first free port; None is any free port. evenstep listens at no other port.
        memory: reads this rank's memory, so that no plan exceeds what fits: anything with the
            methods of ``MemoryReader``. None reads the CUDA device, and nothing on a CPU.
        machine: reads the CPU and memory that this rank can have, for policies that predict speeds
            from them: anything with the methods of ``MachineReader``. None reads this process's CPU
            quota, affinity, waits for a core and memory on Linux, and the whole host elsewhere,
            and only if the policy needs it.
        claims: work stealing in loops over ``loader.steps()``: whether ranks begin each step with a
            part of their planned samples and claim the rest during the step. ``"auto"`` does so
            while it is faster, with the policy ``"auto"`` only. A ``Hybrid`` always does so, with
            its settings. ``"off"`` never does.
        process_group: the data-parallel ranks; None is all ranks.
        sample_seed: seed of random numbers by sample, from 0 to 2^63 - 1: those of augmentation and
            dropout then follow from it, the epoch and the sample's position in the epoch, and not
            from the rank that computes the sample. None leaves them to each rank, as in plain
            training.
        checks_loss: whether ranks compare their gradients to find out if the loss is the mean or
            the sum that the balancer was given. It ends the run if that is wrong beyond doubt.

    Raises:
        ValueError: a number is out of range.
    """

    freshness: Literal["newest", "exact"] = "newest"
    memory: MemoryReader | None = None
    machine: MachineReader | None = None
    claims: Literal["auto", "off"] | Hybrid = "auto"
    process_group: torch.distributed.ProcessGroup | None = None
    sample_seed: int | None = None
    checks_loss: bool = True

    def __post_init__(self) -> None:
        self.check_watch()
        if self.freshness not in ("newest", "exact"):
            raise invalid(
                "Runtime(freshness=...)",
                'be "newest" or "exact"',
                repr(self.freshness),
                'Use "newest" unless every step must decide the very next.',
            )
        if not (isinstance(self.claims, Hybrid) or self.claims in ("auto", "off")):
            raise invalid(
                "Runtime(claims=...)",
                'be "auto", "off" or a `Hybrid`',
                repr(self.claims),
                '"auto" claims while that is faster.',
            )
        seed = self.sample_seed
        if seed is not None and not (type(seed) is int and 0 <= seed < 1 << 63):
            raise invalid(
                "Runtime(sample_seed=...)",
                "be an integer from 0 to 2^63 - 1, or None",
                repr(seed),
                "Give the seed of the run, the same on all ranks and when it is resumed.",
            )
