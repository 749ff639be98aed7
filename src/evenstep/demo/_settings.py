"""What a person may choose, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from ..exceptions import invalid
from ..policies import by_name

SPEEDS = (1.0, 1 / 2, 1 / 3, 1 / 6)
"""The speeds that emulated workers have unless told otherwise, in turn."""

_MOST_WORKERS = 256

DEVICES = ("auto", "cpu", "cuda")

RUNS = ("equal", "balanced", "reference")
"""Folders of the runs, in the order of the runs. What an earlier demo left there goes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One demo, ready to run.

    Attributes:
        num_workers: worker processes, at least 2.
        speeds: emulated speeds, one per worker; None uses the devices as fast as they are.
        policy: of the balanced run, a name or ``"module:Class"``.
        device: ``"cpu"`` or ``"cuda"``.
        num_steps: optimizer steps of each run; None takes as many as fit in about a minute.
        out: folder for events, picture and figures, and for the folders of the runs.
        seed: of the weights and of the order of the text.
    """

    num_workers: int
    speeds: tuple[float, ...] | None
    policy: str
    device: str
    num_steps: int | None
    out: Path
    seed: int = 0


def choose(
    *,
    workers: int | None,
    speeds: tuple[float, ...] | None,
    policy: str,
    device: str,
    steps: int | None,
    out: Path,
    count_cards: Callable[[], int],
) -> Settings:
    """Return the settings for what was asked, with the gaps filled.

    With ``device`` "auto", two cards or more are used as they are, one per worker; otherwise
    workers of unlike speeds are emulated on the CPU.

    Raises:
        ValueError: something cannot be honoured.
    """
    by_name(policy)
    _check(workers, speeds, device, steps)
    _check_out(out)
    cards = count_cards() if device != "cpu" and speeds is None else 0
    if device == "cuda" or cards >= max(2, workers or 2):
        num_workers = _on_cards(workers, cards)
        return Settings(num_workers, None, policy, "cuda", steps, out)

    if speeds is None:
        speeds = tuple(islice(cycle(SPEEDS), workers or len(SPEEDS)))
    if workers not in (None, len(speeds)):
        rule = f"name one speed for each of {workers} workers"
        raise _refused("--speeds", rule, f"{len(speeds)} of them", "Leave out `--workers`.")
    return Settings(len(speeds), speeds, policy, "cpu", steps, out)


def _check(
    workers: int | None, speeds: tuple[float, ...] | None, device: str, steps: int | None
) -> None:
    if device not in DEVICES:
        raise _refused("--device", f"be one of {', '.join(DEVICES)}", device, "Try auto.")
    if workers is not None and workers > _MOST_WORKERS:
        remedy = "Each is a process of its own."
        raise _refused("--workers", f"be at most {_MOST_WORKERS}", workers, remedy)
    if workers is not None and workers < 2:
        raise _refused("--workers", "be at least 2", workers, "One has no other to share with.")
    if steps is not None and steps < 10:
        raise _refused("--steps", "be at least 10", steps, "Fewer show nothing.")
    if speeds is not None and len(speeds) < 2:
        raise _refused("--speeds", "name two or more", speeds, "Write 1,1/2,1/3 say.")
    if device == "cuda" and speeds is not None:
        raise _refused("--speeds", "be left out on cards", speeds, "They run as they are.")


def _check_out(out: Path) -> None:
    """Refuse a folder in which a run would replace what no demo has made."""
    for name in RUNS:
        folder = out / name
        if os.path.exists(folder) and not os.path.isfile(folder / "job.json"):
            remedy = "Its runs are written there: give another folder."
            raise _refused("--out", f"hold no `{name}` of another making", folder, remedy)


def _on_cards(workers: int | None, cards: int) -> int:
    if cards < (workers or 2):
        rule = f"find {workers or 2} CUDA cards or more, one per worker"
        raise _refused("--device cuda", rule, cards, "Use `--device cpu` to emulate workers.")
    return workers or cards


def _refused(option: str, rule: str, got: object, remedy: str) -> ValueError:
    return invalid(f"evenstep demo {option}", rule, got, remedy)
