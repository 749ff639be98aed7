"""A profile's file, which rank 0 reads and writes for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..._planner import places
from ..._warning import warn
from ..._whole_file import write_whole
from ...exceptions import invalid
from ...timemodels import ClusterProfile
from .._exchange._startup import Alone, SideGroup


def read_profile(path: Path | None, side: SideGroup | Alone) -> ClusterProfile | None:
    """Return on all ranks what rank 0 finds at ``path``; None if there is no file. Collective.

    Raises:
        ValueError: it cannot be read, or is no profile.
    """
    if path is None:
        return None
    text, problem = side.share(_read(path) if side.rank == 0 else None)
    if problem is None and text is None:
        return None
    try:
        if problem is not None:
            raise ValueError(problem)
        return ClusterProfile.from_json(text)
    except ValueError as error:
        raise invalid(
            "Balancer.profile(path=...)",
            "name a file that an earlier `profile` wrote, or none",
            f"{str(path)!r} ({error})",
            "Delete it to have all workers measured anew, or give another path.",
        ) from error


def found_in(
    known: ClusterProfile | None, workers: Sequence[str], *, model: str, sizes: Sequence[int] | None
) -> list[int]:
    """Return where in ``known`` each of ``workers`` is, -1 for those that have to be measured.

    Args:
        known: what the file held, if anything.
        workers: those of now.
        model: what is measured now; another one's times are of no use.
        sizes: those that were asked for; None takes whatever was measured.
    """
    if known is None or known.model != model:
        return [-1] * len(workers)
    wanted = set(() if sizes is None else sizes)
    has_all = [wanted <= {*each.sizes.tolist()} for each in known.profiles]
    return [at if at >= 0 and has_all[at] else -1 for at in places(known.workers, workers).tolist()]


def write_profile(path: Path, profile: ClusterProfile) -> None:
    """Write the file whole or not at all, or say why not: training goes on without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [profile.to_json(), "\n"])
    except OSError as error:
        warn(
            f"The profile is not kept in {path} ({error}), so the next run measures anew. Give "
            f"`Balancer.profile(path=...)` a file that rank 0 can write."
        )


def _read(path: Path) -> tuple[str | None, str | None]:
    """Return the file's text, or what keeps it from being read."""
    try:
        return path.read_text(encoding="utf-8"), None
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeDecodeError) as error:
        return None, str(error)
