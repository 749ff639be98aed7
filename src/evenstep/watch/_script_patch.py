"""The change that balances a script, as a unified diff; made where it is certain, else in words."""

from __future__ import annotations

import ast
import difflib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

_IMPORT = "from evenstep.torch import Balancer"
_HARMLESS = ("dataset", "sampler", "batch_size", "batch_sampler", "drop_last", "num_workers")
_SHARD = "fully_shard"
_WRAPPERS = ("DistributedDataParallel", "DDP", _SHARD)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)

_Block: TypeAlias = list[ast.stmt]


@final
@dataclass(frozen=True, slots=True)
class ScriptPatch:
    """How a script changes.

    Attributes:
        diff: for ``git apply`` or ``patch -p1``; empty where it is not certain.
        by_hand: what to do instead, or besides, a line each.
        folder: where the diff applies; empty for the folder that the script's path begins in.
    """

    diff: str
    by_hand: tuple[str, ...] = ()
    folder: str = ""


@dataclass(frozen=True, slots=True)
class _Made:
    """A statement that gives the model, or the loader, its name.

    Attributes:
        statement: such as ``model = DDP(model)``.
        name: such as ``model`` or ``self.model``.
        blocks: the lists of statements that it is in, the outermost first.
        is_again: whether the name was that of the model before, too.
    """

    statement: ast.stmt
    name: str
    blocks: tuple[_Block, ...]
    is_again: bool


def patched(source: str, path: str, *, model_line: int, loader_line: int) -> ScriptPatch:
    """Return the change to a script that prepares its model and its loader.

    The script is read, never run. There is a diff where one function, or the module itself, gives
    names to both, outside of loops, and nothing goes through the loader in between. Whatever else
    there is gets words, and no diff.

    Args:
        source: the script's text.
        path: its name; in the diff, that in its own folder if it is absolute.
        model_line: where DDP or ``fully_shard`` is called, from 1.
        loader_line: where the loader that trains is made.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ScriptPatch("", (f"{path} cannot be read as Python",))
    words = _words_of(tree)
    if "evenstep" in words:
        return ScriptPatch("", (f"{path} imports evenstep already",))
    lines = list(io.StringIO(source, newline=""))
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        made = list(_made_in(scope, _aliases(tree)))
        model, loader = _model_of(made, model_line), _loader_of(made, loader_line)
        after = _meeting(model, loader) if model and loader else None
        if model is None or loader is None or after is None:
            continue
        if _is_used_before(scope, loader, after) or not _stands_alone(after, lines):
            continue
        added = _added(words, model.name, loader.name)
        folder, name = os.path.split(path) if os.path.isabs(path) else ("", path)
        besides = _steps_loop(path) if isinstance(model.statement, ast.Expr) else ()
        return ScriptPatch(_diff(tree, lines, name, after, added), besides, folder)
    return ScriptPatch("", by_hand([f"{path}:{model_line}"], [f"{path}:{loader_line}"]))


def by_hand(models_at: Sequence[str], loaders_at: Sequence[str]) -> tuple[str, ...]:
    """Return in words what a script needs.

    Args:
        models_at: the lines where its models are made.
        loaders_at: likewise of loaders that train, or may.
    """
    num_models = len(models_at)
    names = [f"model_{number}" for number in range(1, num_models + 1)]
    parts = ", ".join([*(names if num_models > 1 else ["model"]), "loader"])
    models = "the model" if num_models == 1 else "all models that train"
    loader = "the loader" if len(loaders_at) == 1 else "the loader that trains"
    at_once = ", all in one call" if num_models > 1 else ""
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


def _steps_loop(path: str) -> tuple[str, ...]:
    return (
        f"FSDP2 is measured in loops over steps only: in {path}, `for batch in loader:` becomes "
        "`for step in loader.steps():` with `for batch in step:` around forward and backward "
        "(docs/loops.md#fsdp2)",
    )


def _words_of(tree: ast.Module) -> set[str]:
    """Return all names that a script has, and the packages that it imports from."""
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Import):
            words |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            words.add((node.module or "").partition(".")[0])
    return words


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Return what imported names are called where they come from."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {one.asname or one.name: one.name for node in imports for one in node.names}


def _made_in(
    scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef, aliases: dict[str, str]
) -> Iterator[tuple[str, _Made]]:
    """Yield what statements of a function make, outside of loops, with what it is made by."""
    for statement, blocks in _statements(scope.body, ()):
        call = getattr(statement, "value", None)
        if not isinstance(call, ast.Call):
            continue
        maker = (_dotted(call.func) or "").rpartition(".")[2]
        maker = aliases.get(maker, maker)
        given = [_dotted(one) for one in call.args]
        if isinstance(statement, ast.Expr) and maker == _SHARD and given and given[0]:
            yield maker, _Made(statement, given[0], blocks, True)
        for target in _targets(statement):
            if name := _dotted(target):
                yield maker, _Made(statement, name, blocks, name in given)


def _statements(
    block: _Block, above: tuple[_Block, ...]
) -> Iterator[tuple[ast.stmt, tuple[_Block, ...]]]:
    """Yield a block's statements and those inside them, but for loops and definitions."""
    blocks = (*above, block)
    for one in block:
        yield one, blocks
        if not isinstance(one, (*_DEFINITIONS, *_LOOPS)):
            for inner in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(one, inner, []), blocks)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def _model_of(made: Sequence[tuple[str, _Made]], line: int) -> _Made | None:
    """Return the model that is made on a line; where layers are sharded, the whole one."""
    models = [(maker, one) for maker, one in made if maker in _WRAPPERS]
    found = [one for _, one in models if _is_on(one.statement, line)]
    sharded = [one for maker, one in models if maker == _SHARD]
    return found[0] if len(found) == 1 else sharded[0] if len(sharded) == 1 else None


def _loader_of(made: Sequence[tuple[str, _Made]], line: int) -> _Made | None:
    """Return the loader that is made on a line, by DataLoader or a call such as one of timm's."""
    found = [one for maker, one in made if "loader" in maker.lower()]
    found = [one for one in found if _is_on(one.statement, line)]
    return found[0] if len(found) == 1 else None


def _is_on(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def _meeting(model: _Made, loader: _Made) -> ast.stmt | None:
    """Return the statement after which both have names; None where that is not certain.

    A model that is wrapped in a branch had its name before, whether or not the branch is taken.
    """
    first, last = sorted((model, loader), key=lambda one: one.statement.lineno)
    if any(block is first.blocks[-1] for block in last.blocks):
        return last.statement
    in_reach = any(block is last.blocks[-1] for block in first.blocks)
    return last.statement if in_reach and first.is_again else None


def _is_used_before(scope: ast.AST, loader: _Made, after: ast.stmt) -> bool:
    """Return whether what uses a loader may have kept it as it was, or gone through it."""
    harmless = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Attribute) and node.attr in _HARMLESS:
            harmless.add(node.value)
        elif isinstance(node, ast.Call) and _dotted(node.func) == "len":
            harmless.update(node.args)
    begin = loader.statement.end_lineno or loader.statement.lineno
    end = after.end_lineno or after.lineno
    return any(
        _dotted(node) == loader.name and begin < node.lineno <= end and node not in harmless
        for node in ast.walk(scope)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    )


def _dotted(node: ast.AST) -> str | None:
    """Return a name, or a chain of attributes of one, as it is written; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def _stands_alone(statement: ast.stmt, lines: Sequence[str]) -> bool:
    """Return whether nothing but a comment is on the lines of a statement beside it."""
    first, last = lines[statement.lineno - 1], lines[(statement.end_lineno or 0) - 1]
    before = first.encode()[: statement.col_offset].decode()
    behind = last.encode()[statement.end_col_offset or 0 :].decode().strip()
    return not before.strip() and (not behind or behind.startswith("#"))


def _added(words: set[str], model: str, loader: str) -> list[str]:
    """Return the two lines that come after both are made."""
    balancer = next(name for name in ("balancer", "evenstep_balancer") if name not in words)
    if model.startswith("self.") and loader.startswith("self."):
        balancer = f"self.{balancer}"
    parts = f"{model}, {loader}"
    return [f"{balancer} = Balancer()", f"{parts} = {balancer}.prepare({parts})"]


def _diff(
    tree: ast.Module, lines: Sequence[str], path: str, after: ast.stmt, added: Sequence[str]
) -> str:
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    first, at = lines[after.lineno - 1], after.end_lineno or after.lineno
    indent = first[: len(first) - len(first.lstrip())]
    new = list(lines)
    if not new[at - 1].endswith(("\n", "\r")):
        new[at - 1] += newline
    new[at:at] = [f"{indent}{one}{newline}" for one in added]
    new.insert(_import_line(tree), _IMPORT + newline)
    found = difflib.unified_diff(list(lines), new, f"a/{path}", f"b/{path}")
    return "".join(_ended(line) for line in found)


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _import_line(tree: ast.Module) -> int:
    """Return after how many lines the import comes: the last one at the top of the module."""
    last = 0
    for one in tree.body:
        is_docstring = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        if isinstance(one, ast.Import | ast.ImportFrom) or (is_docstring and not last):
            last = one.end_lineno or last
        elif last and not isinstance(one, ast.Import | ast.ImportFrom | ast.Try | ast.If):
            break
    return last
