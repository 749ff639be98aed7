"""Facts of the machine under a rank, read from the kernel's files and from the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .._exchange._meeting import interface_address, loopback
from .._host import Cgroups, contents, number_of, throttled_s
from ._checkup_facts import CpuFacts, NetworkFacts, RoomFacts
from ._judge_machines import SLOWING


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limits of the process's groups and of those around them.

    Attributes:
        quota_cores: cores; None is no limit.
        quota_file: the file that says so.
        free_bytes: memory that is left under the tightest limit; None is no limit.
        stat_file: where the kernel counts what the quota held back; None where it does not.
    """

    quota_cores: float | None = None
    quota_file: str = ""
    free_bytes: int | None = None
    stat_file: Path | None = None

    def throttled_s(self) -> float:
        """Return for how long the quota held the group back so far; 0 where it is unknown.

        On several CPUs at once, that is the sum over them.
        """
        return 0.0 if self.stat_file is None else throttled_s(self.stat_file)

    def used_s(self) -> float:
        """Return the CPU time that the group has had so far; 0 where it is unknown."""
        if self.stat_file is None:
            return 0.0
        if (second_us := number_of(contents(self.stat_file), b"usage_usec")) is not None:
            return second_us / 1e6
        first_ns = contents(self.stat_file.with_name("cpuacct.usage"))
        return int(first_ns) / 1e9 if first_ns.strip().isdigit() else 0.0


def read_cgroups(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of this process.

    Args:
        root: of the file system that is read.
    """
    groups = Cgroups.find(root)
    quota, free = groups.quota(), groups.free_bytes()
    if quota is None:
        return CgroupLimits(free_bytes=free)
    named = f"/{quota.file.relative_to(root)}"
    return CgroupLimits(quota.cores, named, free, quota.file.with_name("cpu.stat"))


VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("CUDA_VISIBLE_DEVICES", *SLOWING),
)
"""What is read of the environment."""


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change a rank's speed, as far as they are set."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def read_cpu(num_threads: int, limits: CgroupLimits, root: Path = Path("/")) -> CpuFacts:
    """Return the cores of the machine, and what this process may use of them.

    Args:
        num_threads: that arithmetic uses.
        limits: of the process's control groups.
        root: of the file system that is read.
    """
    number = os.cpu_count() or 1
    has = hasattr(os, "sched_getaffinity")
    affinity = sorted(os.sched_getaffinity(0)) if has else list(range(number))
    folder = root / f"sys/devices/system/cpu/cpu{affinity[0]}/cpufreq"
    return CpuFacts(
        num_cores=number,
        affinity=tuple(affinity),
        num_threads=num_threads,
        quota_cores=limits.quota_cores,
        quota_file=limits.quota_file,
        governor=_text(folder / "scaling_governor"),
        governor_driver=_text(folder / "scaling_driver"),
        pressure=_pressure(root / "proc/pressure/cpu"),
        load=_load(root / "proc/loadavg"),
    )


def read_room(limits: CgroupLimits, root: Path = Path("/")) -> RoomFacts:
    """Return memory and limits of files.

    Args:
        limits: of the process's control groups.
        root: of the file system that is read.
    """
    left = [_available_bytes(root / "proc/meminfo"), limits.free_bytes]
    known = [number for number in left if number is not None]
    shared = None
    with suppress(OSError, AttributeError):
        size = os.statvfs(root / "dev/shm")
        shared = size.f_frsize * size.f_blocks or None
    soft, hard = _open_files()
    return RoomFacts(
        available_bytes=min(known, default=None),
        memory_pressure=_pressure(root / "proc/pressure/memory"),
        shared_bytes=shared,
        open_files=soft,
        open_files_ceiling=hard,
    )


def read_network(
    environ: Mapping[str, str], leader: str, root: Path = Path("/"), port: int = 0
) -> NetworkFacts:
    """Return how others reach this rank: as gloo does, else by the way to the leader.

    Args:
        environ: environment of the process.
        leader: address of rank 0's host.
        root: of the file system that is read.
        port: where this rank listens.
    """
    chosen = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    resolved = ""
    with suppress(OSError):
        resolved = str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    address = (interface_address(chosen) if chosen else None) or resolved
    if not address or address.startswith("127.") or address == "::1":
        address = _towards(leader) or address or loopback()
    return NetworkFacts(resolved, chosen, _interfaces(root), address, port)


def gpus_of_driver(root: Path = Path("/")) -> int:
    """Return how many cards NVIDIA's driver has, whether torch sees them or not."""
    try:
        return len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return 0


def _interfaces(root: Path) -> dict[str, int] | None:
    """Return Mbit/s of interfaces with an address; None where they cannot be listed.

    A bridge, such as Docker's, and a tunnel have 0: what the kernel says there is no link's rate.
    """
    folder = root / "sys/class/net"
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError:
        return None
    found = {}
    for name in names:
        if name == "lo" or interface_address(name) is None:
            continue
        if any((folder / name / file).exists() for file in ("bridge", "tun_flags")):
            found[name] = 0
            continue
        with suppress(ValueError):
            found[name] = max(0, int(_text(folder / name / "speed") or 0))
    return found


def _towards(leader: str) -> str:
    """Return the own address on the way to ``leader``. Nothing is sent."""
    with suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(leader, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return ""


def _open_files() -> tuple[int | None, int | None]:
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    return (None if soft == endless else soft), (None if hard == endless else hard)


def _pressure(file: Path) -> float | None:
    """Return the part of the last minute in which something waited, in [0, 1]."""
    for line in _text(file).splitlines():
        kind, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields if "=" in field)
        with suppress(KeyError, ValueError):
            if kind == "some":
                return float(values["avg60"]) / 100
    return None


def _load(file: Path) -> float:
    with suppress(IndexError, ValueError):
        return float(_text(file).split()[0])
    return 0.0


def _available_bytes(file: Path) -> int | None:
    for line in _text(file).splitlines():
        name, _, value = line.partition(":")
        with suppress(IndexError, ValueError):
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""
