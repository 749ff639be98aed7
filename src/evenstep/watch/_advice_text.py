"""What to do about the waiting that was seen, in words and as a change to the script."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, final

from .._diagnosis import Cause, Diagnosis
from ..advice._counterfactuals import Counterfactuals, SpeedUp, foresee
from ..advice._watched_steps import WatchedSteps
from ._script_patch import ScriptPatch, by_hand, patched
from ._watched_run import CallSite, WatchedRun

WORTH: Final = 1.05
"""Speed-up below which balancing is not advised: a run of 20 hours would end an hour earlier."""

_BECAUSE = {
    Cause.SLOW_WORKER: "compute",
    Cause.SLOW_BACKWARD: "a slow backward",
    Cause.ROTATING: "compute that is slow on another rank in each step",
    Cause.NETWORK: "the network",
    Cause.CHECKPOINT: "its checkpoints",
    Cause.LOGGING: "its logging",
}
_LOADER = "DataLoader"
_RECIPES = {
    "transformers": "docs/huggingface.md",
    "trl": "docs/huggingface.md",
    "accelerate": "docs/huggingface.md#accelerate",
    "lightning": "docs/loops.md#fabric-and-lightning",
    "pytorch_lightning": "docs/loops.md#fabric-and-lightning",
    "lightning_fabric": "docs/loops.md#fabric-and-lightning",
    "keras": "docs/tensorflow.md",
    "tensorflow": "docs/tensorflow.md",
}


@final
@dataclass(frozen=True, slots=True)
class WatchAdvice:
    """What a watch says at its end.

    Attributes:
        verdict: how much is waited, for whom, why, and what would be faster; one paragraph.
        to_do: what to do, a line each.
        diff: the change to the user's own file; empty where there is none, or none is certain.
    """

    verdict: str
    to_do: tuple[str, ...]
    diff: str = ""

    def __str__(self) -> str:
        """Return all of it, as it is printed."""
        return "\n".join([self.verdict, *self.to_do, *([self.diff] if self.diff else [])])


def advice_on(
    run: WatchedRun, *, folder: str, source_of: Callable[[str], str | None]
) -> WatchAdvice:
    """Return what to do about a run that was watched.

    Args:
        run: what was seen.
        folder: what paths are shown relative to.
        source_of: the text of a file; None where it cannot be read.
    """
    foreseen = foresee(
        WatchedSteps.of(
            run.spent_us, num_steps=run.num_steps, num_samples=run.num_samples, size=run.size
        )
    )
    verdict = " ".join([_waiting(run.diagnosis, run.hosts), _speed_ups(foreseen)])
    if foreseen.by_speed.factor is None or foreseen.best < WORTH:
        return WatchAdvice(verdict, tuple(_not_worth_it(foreseen, run.diagnosis)))
    if run.kind == "FSDP1":
        line = "FSDP1 cannot be balanced; FSDP2 (`fully_shard`) can: docs/loops.md#fsdp2"
        return WatchAdvice(verdict, (line,))
    change = _change(run, folder, source_of)
    return WatchAdvice(verdict, (*_beside(foreseen), *change.by_hand), change.diff)


def _waiting(diagnosis: Diagnosis | None, hosts: tuple[str, ...]) -> str:
    if diagnosis is None:
        return "Too few steps were seen to say who waits for whom."
    share = f"{100 * diagnosis.waiting_share:.0f} % of the time is waiting"
    if not diagnosis.found:
        return f"{share}. {_sentence(diagnosis.no_verdict)}".rstrip()
    first = diagnosis.found[0]
    because = _BECAUSE.get(first.cause, first.cause.value)
    return f"{share}{_for(first.rank, hosts)}, because of {because}."


def _for(rank: int | None, hosts: tuple[str, ...]) -> str:
    if rank is None:
        return ""
    host = hosts[rank] if rank < len(hosts) else ""
    return f", for rank {rank} ({host})" if host else f", for rank {rank}"


def _speed_ups(foreseen: Counterfactuals) -> str:
    speed = foreseen.by_speed
    if speed.factor is None:
        return f"What another split would bring cannot be told: {speed.reason}."
    parts = [f"by speed {_times(speed)}"]
    length = foreseen.by_length
    if length.factor is not None and not length.reason:
        parts += [f"by length {_times(length)}", f"by both {_times(foreseen.by_both)}"]
    text = f"Balanced {', '.join(parts)}"
    if foreseen.without_slowest.factor is not None:
        text += f"; without rank {foreseen.slowest} {_times(foreseen.without_slowest)}"
    text += "."
    if length.reason:
        text += f" By length: {length.reason}."
    if speed.reason:
        text += f" The range: {speed.reason}."
    return text


def _times(one: SpeedUp) -> str:
    assert one.factor is not None
    assert one.least is not None
    if one.least < 0.95 * one.factor:
        return f"{one.least:.2f}x to {one.factor:.2f}x"
    return f"{one.factor:.2f}x"


def _not_worth_it(foreseen: Counterfactuals, diagnosis: Diagnosis | None) -> Iterator[str]:
    if foreseen.by_speed.factor is None:
        yield "No advice: watch a longer part of the run."
        return
    yield (
        f"Balancing is not worth it here: it would bring {foreseen.best:.2f}x, "
        f"and below {WORTH:.2f}x the script is better left as it is."
    )
    found = () if diagnosis is None else diagnosis.found
    for one in found[:2]:
        whose = "" if one.rank is None else f" on rank {one.rank}"
        yield f"What would help ({one.cause.value}{whose}): {one.remedy}"


def _beside(foreseen: Counterfactuals) -> Iterator[str]:
    """Yield what to consider beside the change of the script."""
    speed, both = foreseen.by_speed.factor, foreseen.by_both.factor
    without = foreseen.without_slowest.factor
    assert speed is not None
    if both is not None and both >= WORTH * speed:
        yield (
            f"Lengths matter: `Balancer(cost=lengths)`, with the length of each sample, brings "
            f"{both:.2f}x where `Balancer()` brings {speed:.2f}x: docs/lengths.md"
        )
    if without is not None and without > WORTH * foreseen.best:
        yield f"Faster than any split: train without rank {foreseen.slowest}."


def _change(run: WatchedRun, folder: str, source_of: Callable[[str], str | None]) -> ScriptPatch:
    model = next((site for site in run.sites if site.made != _LOADER), None)
    loader = next((site for site in run.sites if site.made == _LOADER), None)
    for site in (model, loader):
        if site is not None and site.library in _RECIPES:
            page = _RECIPES[site.library]
            return ScriptPatch("", (f"{site.library} makes the {_part(site)}: see {page}",))
    if model is None or not model.file:
        return ScriptPatch("", ("the recipe for loops of your own: docs/in-your-script.md",))
    if loader is None or not loader.file:
        at = _shown(model, folder)
        line = f"no DataLoader was seen, and evenstep balances one: docs/data.md (model: {at})"
        return ScriptPatch("", (line,))
    source = source_of(model.file) if model.file == loader.file else None
    if source is None:
        return ScriptPatch("", by_hand(_shown(model, folder), _shown(loader, folder)))
    path = _path(model.file, folder)
    return patched(source, path, model_line=model.line, loader_line=loader.line)


def _part(site: CallSite) -> str:
    return "loader" if site.made == _LOADER else "model"


def _shown(site: CallSite, folder: str) -> str:
    return f"{_path(site.file, folder)}:{site.line}"


def _path(file: str, folder: str) -> str:
    """Return a path as it is shown: relative, where it is in the folder."""
    inside = os.path.normpath(file).startswith(os.path.join(os.path.normpath(folder), ""))
    return os.path.relpath(file, folder) if inside else file


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".") if text else ""
