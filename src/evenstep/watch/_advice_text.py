"""What to do about the waiting that was seen, in words and as a diff of the script."""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np

from .._diagnosis import Phase
from .._types import IntArray
from ._counterfactuals import OWN_S, Counterfactuals, SpeedUp, WatchedSteps, foresee
from ._script_flow import Binding, Script, bindings_of, dotted, targets
from ._step_records import Row
from ._watched_run import CallSite

_IMPORT = "from evenstep.torch import Balancer"
_CHANGE = "the change, for `git apply`"
_HARMLESS = ("dataset", "sampler", "batch_size", "batch_sampler", "drop_last", "num_workers")


_Place = tuple[ast.stmt, str, str]
"""The statement after which the balancer comes, and the names of model and loader there."""


def patched(source: str, path: str, *, model_line: int, loader_line: int) -> tuple[str, ...]:
    """Return as lines what a script needs to have its model and its loader prepared.

    The script is read, never run. Right for names that can be followed in one file, where each
    part goes one way only: then the last line is the change, for ``git apply`` or ``patch -p1``.
    Whatever else there is gets words, and no diff.

    Args:
        source: the script's text.
        path: its name; in the diff, that in its own folder if it is absolute.
        model_line: where DDP or ``fully_shard`` is called, from 1.
        loader_line: where the loader that trains is made.
    """
    try:
        script = Script(source)
    except (SyntaxError, ValueError):
        return (f"{path} cannot be read as Python",)
    if re.search(r"^\s*(import|from)\s.*\bevenstep\b", source, re.MULTILINE):
        return (f"{path} imports evenstep already",)
    calls = script.made_at(model_line, "model"), script.made_at(loader_line, "loader")
    words = by_hand([f"{path}:{model_line}"], [f"{path}:{loader_line}"])
    if calls[0] is None or calls[1] is None:
        return words
    models = bindings_of(script, calls[0], "model")
    loaders = bindings_of(script, calls[1], "loader")
    found = next(_places(script, models, loaders), None)
    lines = list(io.StringIO(source, newline=""))
    if found is None or not _stands_alone(found[0], lines):
        return words
    folder, name = os.path.split(path) if os.path.isabs(path) else ("", path)
    where = f" in {folder}" if folder else ""
    change = f"{_CHANGE}{where}:\n{_diff(script, lines, name, found)}"
    if script.called(calls[0]) != "fully_shard":
        return (change,)
    return (
        f"FSDP2 is measured in loops over steps only: in {path}, `for batch in loader:` becomes "
        "`for step in loader.steps():` with `for batch in step:` around forward and backward "
        "(docs/loops.md#fsdp2)",
        change,
    )


def kept_change(notes: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Write the change into a file, and return the command that makes it; nothing without one.

    Args:
        notes: as ``advice_notes`` returns them.
        folder: in which ``evenstep.diff`` is written, over one of before.
    """
    head, _, diff = (notes[-1] if notes else "").partition("\n")
    if not head.startswith(_CHANGE):
        return ()
    file = folder / "evenstep.diff"
    try:
        file.write_bytes(diff.encode())
    except OSError:  # the change was said
        return ()
    where = head.removeprefix(_CHANGE).removeprefix(" in ").removesuffix(":")
    goes = f"cd {shlex.quote(where)} && " if where else ""
    return (f"next: {goes}git apply {shlex.quote(str(file) if where else file.name)}",)


def by_hand(models_at: Sequence[str], loaders_at: Sequence[str]) -> tuple[str, ...]:
    """Return in words what a script needs.

    Args:
        models_at: the lines where its models are made.
        loaders_at: likewise of loaders that train, or may.
    """
    names, models, at_once = ["model"], "the model", ""
    if len(models_at) > 1:
        names = [f"model_{number}" for number in range(1, len(models_at) + 1)]
        models, at_once = "all models that train", ", all in one call"
    parts = ", ".join([*names, "loader"])
    loader = "the loader" if len(loaders_at) == 1 else "the loader that trains"
    several = (
        "if a step reads several of these loaders, make one data set of them first: "
        "docs/data.md#several-loaders"
    )
    return (
        *([several] if len(loaders_at) > 1 else []),
        f"import it: {_IMPORT}",
        f"after {models} ({', '.join(models_at)}) and {loader} ({' or '.join(loaders_at)}) are "
        f"made, and before the loop{at_once}: balancer = Balancer(); "
        f"{parts} = balancer.prepare({parts})",
    )


def _places(
    script: Script, models: Sequence[Binding], loaders: Sequence[Binding]
) -> Iterator[_Place]:
    """Yield where both parts have a name and the loader has not been used yet."""
    for model in models:
        for loader in loaders:
            if model.scope is not loader.scope:
                continue
            after = _meeting(script, model, loader)
            if after is not None and not _is_used_before(script, loader, after):
                yield after, model.name, loader.name


def _meeting(script: Script, model: Binding, loader: Binding) -> ast.stmt | None:
    """Return the statement after which both parts are there; None where that is not certain."""
    given = [(one.statement, one.name) for one in (model, loader) if one.statement is not None]
    if not given or any(script.is_in_loop(statement) for statement, _ in given):
        return None
    given.sort(key=lambda one: one[0].lineno)
    (first, first_name), (last, last_name) = given[0], given[-1]
    both = product([first, *script.compounds(first)], [last, *script.compounds(last)])
    one, other = next(pair for pair in both if script.block_of(pair[0]) is script.block_of(pair[1]))
    if one is first:
        return last
    # The first is deeper in: in a branch, which the other configurations of the script skip.
    if not _is_there_anyhow(script, first, first_name):
        return None
    return other if other is last or _is_there_anyhow(script, last, last_name) else None


def _is_there_anyhow(script: Script, statement: ast.stmt, name: str) -> bool:
    """Return whether a name is given also where the branch that gives it is not taken."""
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Call) and any(dotted(one) == name for one in value.args):
        return True  # as in `model = DDP(model)`
    branches = [one for one in script.compounds(statement) if isinstance(one, ast.If)]
    return all(_gives(one.body, name) and _gives(one.orelse, name) for one in branches)


def _gives(block: Sequence[ast.stmt], name: str) -> bool:
    for one in block:
        if any(dotted(target) == name for target in targets(one)):
            return True
        if isinstance(one, ast.If) and _gives(one.body, name) and _gives(one.orelse, name):
            return True
    return False


def _is_used_before(script: Script, loader: Binding, after: ast.stmt) -> bool:
    """Return whether what uses a loader may have kept it as it was, or gone through it."""
    begin = 0 if loader.statement is None else loader.statement.end_lineno or 0
    end = after.end_lineno or after.lineno
    own = set() if loader.statement is None else set(ast.walk(loader.statement))
    for node in script.within(loader.scope):
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        name, is_between = dotted(node), begin < node.lineno <= end
        if name == loader.name and is_between and not _is_harmless(script, node):
            return True
        if name is not None and name == loader.former and node not in own:
            return True
    return False


def _is_harmless(script: Script, node: ast.AST) -> bool:
    """Return whether a loader is asked for its length, or for what it has, and no more."""
    above = next(script.above(node))
    if isinstance(above, ast.Attribute):
        return above.attr in _HARMLESS
    return isinstance(above, ast.Call) and dotted(above.func) == "len"


def _stands_alone(statement: ast.stmt, lines: Sequence[str]) -> bool:
    """Return whether nothing but a comment is on the lines of a statement beside it."""
    first, last = lines[statement.lineno - 1], lines[(statement.end_lineno or 0) - 1]
    before = first.encode()[: statement.col_offset].decode()
    behind = last.encode()[statement.end_col_offset or 0 :].decode().strip()
    return not before.strip() and (not behind or behind.startswith("#"))


def _diff(script: Script, lines: Sequence[str], path: str, place: _Place) -> str:
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    statement, model, loader = place
    is_taken = any(re.search(r"\bbalancer\b", line) for line in lines)
    free = "evenstep_balancer" if is_taken else "balancer"
    keeps = model.startswith("self.") and loader.startswith("self.")
    balancer = f"self.{free}" if keeps else free
    parts = f"{model}, {loader}"
    first = lines[statement.lineno - 1]
    indent = first[: len(first) - len(first.lstrip())]
    added = [f"{balancer} = Balancer()", f"{parts} = {balancer}.prepare({parts})"]
    after = statement.end_lineno or statement.lineno
    new = list(lines)
    if not new[after - 1].endswith(("\n", "\r")):
        new[after - 1] += newline
    new[after:after] = [f"{indent}{one}{newline}" for one in added]
    new.insert(_import_line(script), _IMPORT + newline)
    found = difflib.unified_diff(list(lines), new, f"a/{path}", f"b/{path}")
    return "".join(_ended(line) for line in found)


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _import_line(script: Script) -> int:
    """Return after how many lines the import comes: the last one at the top of the module."""
    last = 0
    for one in script.tree.body:
        is_docstring = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        if isinstance(one, ast.Import | ast.ImportFrom) or (is_docstring and not last):
            last = one.end_lineno or last
        elif last and not isinstance(one, ast.Import | ast.ImportFrom | ast.Try | ast.If):
            break
    return last


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


def advice_notes(kind: str, sites: Sequence[CallSite], rows: Sequence[Row]) -> tuple[str, ...]:
    """Return what to do about a run that was watched, as lines.

    First what other splits would bring, or why that cannot be known; then what to do. The change
    to the user's own file comes last, a line with all of its own, if there is one.

    Args:
        kind: how gradients are exchanged: ``"DDP"``, ``"FSDP2"``, ``"FSDP1"`` or ``"Keras"``.
        sites: where the script made its model and its loader; rank 0's.
        rows: the newest steps.
    """
    if kind == "FSDP1":
        sentence = "FSDP1 cannot be balanced, and no speed-up of another split is known"
        return sentence, "FSDP2 (`fully_shard`) can: docs/loops.md#fsdp2"
    spent_us = np.array([[one.spent_us for one in row] for row in rows])
    num_steps = np.array([row[0].num_steps for row in rows])
    foreseen = foresee(
        WatchedSteps.of(
            spent_us,
            num_steps=num_steps,
            num_samples=[[one.num_samples for one in row] for row in rows],
            size=[[one.clues.size for one in row] for row in rows],
            own_s=_own_s(kind, spent_us, num_steps),
        )
    )
    sentence, late = _speed_ups(foreseen), _late_for_input(spent_us, num_steps)
    fed = "" if late is None else late[1]
    if foreseen.by_speed.factor is None:
        return tuple(filter(None, (sentence, fed)))
    if foreseen.best < WORTH:
        return *filter(None, (sentence, fed)), (
            f"balancing is not worth it here: it would bring {foreseen.best:.2f}x, and below "
            f"{WORTH:.2f}x the script is better left as it is (docs/watch.md)"
        )
    beside = _beside(foreseen, keeps=None if late is None else late[0])
    return (*filter(None, (sentence, fed)), *beside, *_change(sites))


def _late_for_input(spent_us: IntArray, num_steps: IntArray) -> tuple[int, str] | None:
    """Return the rank that alone waits for its input, and what mending that brings; else None."""
    if spent_us.shape[1] < 2:
        return None
    means_us = spent_us.sum(axis=0) / num_steps.sum()  # (ranks, phases)
    input_us, step_us = means_us[:, Phase.INPUT], float(means_us.sum(axis=1).max())
    rank = int(input_us.argmax())
    more_us = float(input_us[rank] - np.delete(input_us, rank).max())
    waits_us = float(np.delete(means_us[:, Phase.REDUCTION :].sum(axis=1), rank).min())
    saved_us = min(more_us, waits_us)
    if saved_us < (1 - 1 / WORTH) * step_us:
        return None
    brings = step_us / (step_us - saved_us)
    return rank, (
        f"rank {rank} waits {more_us / 1e6:.2g} s a step longer for its input than the others: "
        f"more loader workers or faster storage there bring up to {brings:.2f}x"
    )


def _own_s(kind: str, spent_us: IntArray, num_steps: IntArray) -> float:
    """Return what a balanced step takes beside: evenstep's own time, less what it spares.

    Before each step of Keras, TensorFlow sums over all workers how many have a batch. evenstep
    knows that. A step of FSDP2 has at least two forwards: layers are gathered once more in each.
    """
    met_s = float(np.median(spent_us[..., Phase.MEETING].min(axis=1) / num_steps) / 1e6)
    return {"Keras": _KERAS_OWN_S - met_s, "FSDP2": OWN_S + met_s}.get(kind, OWN_S)


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


def _beside(foreseen: Counterfactuals, *, keeps: int | None) -> Iterator[str]:
    """Yield what to consider beside the change of the script; ``keeps`` is no rank to leave out."""
    speed, both = foreseen.by_speed.factor, foreseen.by_both.factor
    without = foreseen.without_slowest.factor
    assert speed is not None
    if both is not None and both >= WORTH * speed:
        yield (
            f"lengths matter: `Balancer(cost=lengths)`, with the length of each sample, brings "
            f"{both:.2f}x where `Balancer()` brings {speed:.2f}x: docs/lengths.md"
        )
    leaves = without is not None and without > WORTH * foreseen.best
    if leaves and foreseen.slowest != keeps:
        yield f"faster than any split: train without rank {foreseen.slowest}"


def _change(sites: Sequence[CallSite]) -> tuple[str, ...]:
    """Return how a script of this machine changes, or where to read about it."""
    models = [site for site in sites if site.made != _LOADER]
    loaders = [site for site in sites if site.made == _LOADER]
    for site in (*models, *loaders):
        if site.library in _RECIPES:
            part, page = "loader" if site in loaders else "model", _RECIPES[site.library]
            return (f"{site.library} makes the {part}: see {page}",)
    models_at = [f"{_path(site.file)}:{site.line}" for site in models if site.file]
    loaders_at = [f"{_path(site.file)}:{site.line}" for site in loaders if site.file]
    if not models_at:
        return ("the recipe for loops of your own: docs/in-your-script.md",)
    if not loaders_at:
        at = ", ".join(models_at)
        return (f"no DataLoader was seen, and evenstep balances one: docs/data.md (model: {at})",)
    model, loader = models[0], loaders[0]
    if not len(models) == len(loaders) == 1 or model.file != loader.file:
        return by_hand(models_at, loaders_at)
    try:
        source = Path(model.file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return by_hand(models_at, loaders_at)
    path = _path(model.file)
    return patched(source, path, model_line=model.line, loader_line=loader.line)


def _path(file: str) -> str:
    """Return a path as it is shown: relative, where it is in the current folder."""
    inside = os.path.normpath(file).startswith(os.path.join(os.getcwd(), ""))
    return os.path.relpath(file) if inside else file
