"""What control groups of either version allow this process: cores and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


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
        """Return for how long the quota held the group back so far; 0 where it is unknown."""
        if self.stat_file is None:
            return 0.0
        with suppress(OSError, ValueError):
            for line in self.stat_file.read_text("ascii").splitlines():
                name, _, value = line.partition(" ")
                if name == "throttled_time":
                    return int(value) * 1e-9
                if name == "throttled_usec":
                    return int(value) * 1e-6
        return 0.0


def read_cgroups(root: Path = Path("/")) -> CgroupLimits:
    """Return the limits of this process.

    Args:
        root: of the file system that is read.
    """
    quotas: list[tuple[float, Path]] = []
    free: list[int] = []
    for folder in _folders(root):
        if (cores := _cores(folder)) is not None:
            quotas.append(cores)
        if (left := _free_bytes(folder)) is not None:
            free.append(left)
    quota, file = min(quotas, default=(None, None))
    stat = None if file is None else file.with_name("cpu.stat")
    named = "" if file is None else f"/{file.relative_to(root)}"
    return CgroupLimits(quota, named, min(free, default=None), stat)


def _folders(root: Path) -> Iterator[Path]:
    """Yield the folders of the process's groups with CPU or memory, and of all around them."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
        groups = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return  # not Linux
    of: dict[str, str] = {}
    for line in groups:
        _, controllers, path = line.split(":", 2)
        of |= dict.fromkeys(controllers.split(","), path)
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        # The first version has a hierarchy for each controller, the second a single one, unnamed.
        here = {""} if kind[0] == "cgroup2" else {"cpu", "memory"} & set(kind[2].split(","))
        for controller in here & of.keys():
            yield from _upwards(root / fields[4].lstrip("/"), fields[3], of[controller])


def _upwards(mount: Path, mounted: str, path: str) -> Iterator[Path]:
    """Yield the group's folder and those around it, as far as they are mounted here."""
    inside = path.removeprefix(mounted.rstrip("/")) if mounted != "/" else path
    folder = mount / inside.lstrip("/")
    if ".." in Path(inside).parts or not folder.is_dir():
        folder = mount  # a container sees its own group alone, under the name that the host has
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _cores(folder: Path) -> tuple[float, Path] | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text("ascii").split()
        return None if quota == "max" else (int(quota) / int(period), folder / "cpu.max")
    with suppress(OSError, ValueError):
        limit = int((folder / "cpu.cfs_quota_us").read_text("ascii"))
        length = int((folder / "cpu.cfs_period_us").read_text("ascii"))
        return None if limit <= 0 else (limit / length, folder / "cpu.cfs_quota_us")
    return None


def _free_bytes(folder: Path) -> int | None:
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for most, used in names:
        with suppress(OSError, ValueError):  # "max" is no number, and no limit
            limit = int((folder / most).read_text("ascii"))
            cached = _reclaimable(folder)
            if limit < 1 << 60:  # what the first version has for no limit
                return max(0, limit - int((folder / used).read_text("ascii")) + cached)
    return None


def _reclaimable(folder: Path) -> int:
    """Return the bytes of files that the group caches, and gives back when it needs memory."""
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text("ascii").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0
