"""What to do about the waiting that was seen, in words and as a change to the script."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np

from .._diagnosis import Phase
from ._counterfactuals import OWN_S, Counterfactuals, SpeedUp, WatchedSteps, foresee
from ._script_patch import ScriptPatch, by_hand, patched
from ._watched_run import CallSite, WatchedRun

WORTH: Final = 1.05
"""Speed-up below which balancing is not advised: a run of 20 hours would end an hour earlier."""

_KERAS_OWN_S = 0.0015  # of a balanced step: 1 ms for the batch, the rest for calls in the graph
_LOADER = "DataLoader"
_RECIPES = {
    "transformers": "docs/huggingface.md",
    "trl": "docs/huggingface.md",
    "accelerate": "docs/huggingface.md",  # or what uses it, such as `Trainer`: on one page
    "lightning": "docs/loops.md#fabric-and-lightning",
    "pytorch_lightning": "docs/loops.md#fabric-and-lightning",
    "lightning_fabric": "docs/loops.md#fabric-and-lightning",
    "keras": "docs/tensorflow.md",
    "tensorflow": "docs/tensorflow.md",
}


@final
@dataclass(frozen=True, slots=True)
class WatchAdvice:
    """What to do about what was seen.

    Attributes:
        speed_ups: what other splits would bring, or why that cannot be known.
        to_do: what to do, a line each.
        diff: the change to the user's own file; empty where there is none, or none is certain.
        folder: where the diff applies; empty for the one that paths are shown relative to.
    """

    speed_ups: str
    to_do: tuple[str, ...]
    diff: str = ""
    folder: str = ""

    def notes(self) -> tuple[str, ...]:
        """Return it as lines; the diff is one, with all of its own."""
        where = f" in {self.folder}" if self.folder else ""
        change = (f"the change, for `git apply`{where}:\n{self.diff}",) if self.diff else ()
        return (self.speed_ups, *self.to_do, *change)


def advice_notes(run: WatchedRun) -> tuple[str, ...]:
    """Return what a watch says at its end, on scripts of this machine."""
    return advice_on(run, folder=os.getcwd(), source_of=_text_of).notes()


def _text_of(file: str) -> str | None:
    try:
        return Path(file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def advice_on(
    run: WatchedRun, *, folder: str, source_of: Callable[[str], str | None]
) -> WatchAdvice:
    """Return what to do about a run that was watched.

    Args:
        run: what was seen.
        folder: what paths are shown relative to.
        source_of: the text of a file; None where it cannot be read.
    """
    if run.kind == "FSDP1":
        told = "what another split would bring cannot be told of FSDP1, nor can it be balanced"
        return WatchAdvice(told, ("FSDP2 (`fully_shard`) can: docs/loops.md#fsdp2",))
    foreseen = foresee(
        WatchedSteps.of(
            run.spent_us,
            num_steps=run.num_steps,
            num_samples=run.num_samples,
            size=run.size,
            own_s=_own_s(run),
        )
    )
    told = _speed_ups(foreseen)
    if foreseen.by_speed.factor is None:
        return WatchAdvice(told, ())
    if foreseen.best < WORTH:
        line = (
            f"balancing is not worth it here: it would bring {foreseen.best:.2f}x, and below "
            f"{WORTH:.2f}x the script is better left as it is (docs/watch.md)"
        )
        return WatchAdvice(told, (line,))
    change = _change(run, folder, source_of)
    to_do = (*_beside(foreseen), *change.by_hand)
    return WatchAdvice(told, to_do, change.diff, change.folder)


def _own_s(run: WatchedRun) -> float:
    """Return what a balanced step takes beside: evenstep's own time, less what it spares.

    Before each step of Keras, TensorFlow sums over all workers how many have a batch. evenstep
    knows that. A step of FSDP2 has at least two forwards: layers are gathered once more in each.
    """
    met_s = float(np.median(run.spent_us[..., Phase.MEETING].min(axis=1) / run.num_steps) / 1e6)
    return {"Keras": _KERAS_OWN_S - met_s, "FSDP2": OWN_S + met_s}.get(run.kind, OWN_S)


def _speed_ups(foreseen: Counterfactuals) -> str:
    speed = foreseen.by_speed
    if speed.factor is None:
        return f"what another split would bring cannot be told: {speed.reason}"
    parts = [f"by speed {_times(speed)}"]
    length = foreseen.by_length
    if length.factor is not None and not length.reason:
        parts += [f"by length {_times(length)}", f"by both {_times(foreseen.by_both)}"]
    elif length.reason:
        parts += [f"not by length, as {length.reason}"]
    text = f"balanced {', '.join(parts)}"
    if foreseen.without_slowest.factor is not None:
        text += f"; without rank {foreseen.slowest}: {_times(foreseen.without_slowest)}"
    return text


def _times(one: SpeedUp) -> str:
    assert one.factor is not None
    if round(one.factor, 2) < 1:
        return f"{one.factor:.2f}x (slower)"
    bound = f" (at least {one.least:.2f}x, as {one.reason})" if one.reason else ""
    return f"{one.factor:.2f}x{bound}"


def _beside(foreseen: Counterfactuals) -> Iterator[str]:
    """Yield what to consider beside the change of the script."""
    speed, both = foreseen.by_speed.factor, foreseen.by_both.factor
    without = foreseen.without_slowest.factor
    assert speed is not None
    if both is not None and both >= WORTH * speed:
        yield (
            f"lengths matter: `Balancer(cost=lengths)`, with the length of each sample, brings "
            f"{both:.2f}x where `Balancer()` brings {speed:.2f}x: docs/lengths.md"
        )
    if without is not None and without > WORTH * foreseen.best:
        yield f"faster than any split: train without rank {foreseen.slowest}"


def _change(run: WatchedRun, folder: str, source_of: Callable[[str], str | None]) -> ScriptPatch:
    models = [site for site in run.sites if site.made != _LOADER]
    loaders = [site for site in run.sites if site.made == _LOADER]
    for site in (*models, *loaders):
        if site.library in _RECIPES:
            page = _RECIPES[site.library]
            return ScriptPatch("", (f"{site.library} makes the {_part(site)}: see {page}",))
    models_at = [_shown(site, folder) for site in models if site.file]
    loaders_at = [_shown(site, folder) for site in loaders if site.file]
    if not models_at:
        return ScriptPatch("", ("the recipe for loops of your own: docs/in-your-script.md",))
    if not loaders_at:
        at = ", ".join(models_at)
        line = f"no DataLoader was seen, and evenstep balances one: docs/data.md (model: {at})"
        return ScriptPatch("", (line,))
    model, loader = models[0], loaders[0]
    is_one_file = len(models) == len(loaders) == 1 and model.file == loader.file
    source = source_of(model.file) if is_one_file else None
    if source is None:
        return ScriptPatch("", by_hand(models_at, loaders_at))
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
