"""A folder laid out as Linux lays out what it tells of a process."""

from __future__ import annotations

from pathlib import Path

SECOND = "30 25 0:26 {mounted} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
FIRST = (
    "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


class LinuxRoot:
    """Writes files under a root.

    Args:
        root: an empty folder.
        version: of the control groups, 1 or 2.
        group: the process's own.
        mounted: which group of the host is seen at the top.
    """

    def __init__(self, root: Path, version: int, group: str, *, mounted: str = "/") -> None:
        self.root, self.version = root, version
        mounts = FIRST if version == 1 else SECOND.format(mounted=mounted)
        self.write("proc/self/mountinfo", mounts)
        self.join(group)

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def join(self, group: str) -> None:
        """Move the process to another group."""
        lines = f"4:cpu,cpuacct:{group}\n3:memory:{group}\n0::/\n"
        self.write("proc/self/cgroup", lines if self.version == 1 else f"0::{group}\n")

    def quota(self, group: str, cores: float | str) -> None:
        """Set the quota of a group; text is written as it is."""
        words = isinstance(cores, str)
        if self.version == 2:
            self.write(
                f"sys/fs/cgroup{group}/cpu.max", cores if words else f"{cores * 1e5:.0f} 100000"
            )
            return
        folder = f"sys/fs/cgroup/cpu,cpuacct{group}"
        self.write(f"{folder}/cpu.cfs_period_us", "100000\n")
        self.write(f"{folder}/cpu.cfs_quota_us", cores if words else f"{cores * 1e5:.0f}\n")

    def memory(self, group: str, limit: str, usage: int, cached: int) -> None:
        """Set a group's limit of memory, what it uses, and how much of that is cached files."""
        folder, names, inactive = f"sys/fs/cgroup{group}", ("max", "current"), "inactive_file"
        if self.version == 1:
            folder, inactive = f"sys/fs/cgroup/memory{group}", "total_inactive_file"
            names = "limit_in_bytes", "usage_in_bytes"
        self.write(f"{folder}/memory.{names[0]}", f"{limit}\n")
        self.write(f"{folder}/memory.{names[1]}", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"cache 9\n{inactive} {cached}\n")

    def throttled(self, group: str, seconds: float) -> None:
        """Say for how long a quota has held a group back."""
        if self.version == 2:
            text = f"usage_usec 9\nnr_throttled 3\nthrottled_usec {seconds * 1e6:.0f}\n"
            self.write(f"sys/fs/cgroup{group}/cpu.stat", text)
        else:
            text = f"nr_periods 9\nnr_throttled 3\nthrottled_time {seconds * 1e9:.0f}\n"
            self.write(f"sys/fs/cgroup/cpu,cpuacct{group}/cpu.stat", text)

    def pressure(self, group: str, seconds: float) -> None:
        """Say for how long some process of a group waited for a core; version 2."""
        some = f"some avg10=1.00 avg60=2.00 avg300=0.00 total={seconds * 1e6:.0f}\n"
        self.write(f"sys/fs/cgroup{group}/cpu.pressure", f"{some}full avg10=0.00 total=7\n")

    def thread(self, number: int, ran_s: float, waited_s: float) -> None:
        """Say for how long a thread has run, and waited for a core."""
        text = f"{ran_s * 1e9:.0f} {waited_s * 1e9:.0f} 45\n"
        self.write(f"proc/self/task/{number}/schedstat", text)
