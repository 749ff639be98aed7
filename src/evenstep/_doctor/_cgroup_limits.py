"""What control groups allow this process at one moment: cores and memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .._host import Cgroups, contents, number_of, throttled_s


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
