"""Which names a script's model and loader go by, in its syntax tree, as they are handed on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Literal, TypeAlias, final

Part: TypeAlias = Literal["model", "loader"]
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Scope: TypeAlias = ast.Module | Function

SHARD: Final = "fully_shard"

_WRAPPERS = ("DistributedDataParallel", "DDP", SHARD)
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A name that a part goes under in a function, or in the module.

    Attributes:
        scope: where.
        statement: the one that gives the name; None for a parameter.
        name: such as ``model`` or ``self.model``.
        former: the part's name before the statement, where the statement only renames it.
    """

    scope: Scope
    statement: ast.stmt | None
    name: str
    former: str = ""


@final
class Script:
    """The tree of a script, with the way up from each node.

    Args:
        source: its text; never run.

    Raises:
        SyntaxError: it is no Python.
    """

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self._above = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self._imported = {
            alias.asname or alias.name: alias.name
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node is in, from the inside out."""
        while (node := self._above.get(node)) is not None:  # type: ignore[assignment]
            yield node

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function that a node is in, or the module."""
        return next(one for one in self.above(node) if isinstance(one, _SCOPES))

    def class_of(self, scope: Scope) -> ast.ClassDef | None:
        """Return the class whose method this is; None if it is none."""
        above = self._above.get(scope)
        return above if isinstance(above, ast.ClassDef) else None

    def inside(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node is in, in its own function."""
        return takewhile(lambda one: not isinstance(one, _SCOPES), self.above(node))

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that a node is in."""
        return next(one for one in (node, *self.above(node)) if isinstance(one, ast.stmt))

    def within(self, scope: Scope) -> Iterator[ast.AST]:
        """Yield all nodes of a scope, without those of functions inside it."""
        todo: list[ast.AST] = list(ast.iter_child_nodes(scope))
        while todo:
            node = todo.pop(0)
            yield node
            if not isinstance(node, (*_SCOPES, ast.Lambda, ast.ClassDef)):
                todo.extend(ast.iter_child_nodes(node))

    def compounds(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the compound statements that one is in, in its function, the innermost first."""
        return [one for one in self.inside(statement) if isinstance(one, ast.stmt)]

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that one stands in."""
        above = self._above[statement]
        blocks = [value for _, value in ast.iter_fields(above) if isinstance(value, list)]
        return next(block for block in blocks if any(one is statement for one in block))

    def is_in_loop(self, node: ast.AST) -> bool:
        """Return whether a loop of its own function runs it several times."""
        return any(isinstance(one, _LOOPS) for one in self.inside(node))

    def calls(self) -> list[ast.Call]:
        """Return all calls, in order of their lines."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return sorted(found, key=lambda call: (call.lineno, call.col_offset))

    def called(self, call: ast.Call) -> str:
        """Return the last name of what is called, as it is called where it comes from."""
        name = (dotted(call.func) or "").rpartition(".")[2]
        return self._imported.get(name, name) if isinstance(call.func, ast.Name) else name

    def made_at(self, line: int, part: Part) -> ast.Call | None:
        """Return the call that makes a part, in the statement that spans a line; None if unclear.

        A model is made by DDP or ``fully_shard``, whatever they are imported as; a loader by a
        call that has "loader" in its name, such as one of timm's.
        """
        found = [call for call in self.calls() if self._makes(call, part)]
        found = [call for call in found if _spans(self.statement_of(call), line)]
        return found[0] if len(found) == 1 else None

    def _makes(self, call: ast.Call, part: Part) -> bool:
        name = self.called(call)
        return name in _WRAPPERS if part == "model" else "loader" in name.lower()


def dotted(node: ast.AST) -> str | None:
    """Return a name, or a chain of attributes of one, as it is written; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def targets(statement: ast.stmt) -> list[ast.expr]:
    """Return what a statement assigns to, each as it stands."""
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def _spans(statement: ast.stmt, line: int) -> bool:
    # Of a compound statement, the header alone: what is inside are statements of their own.
    body = getattr(statement, "body", None)
    end = statement.end_lineno or statement.lineno
    last = body[0].lineno - 1 if isinstance(body, list) and body else end
    return statement.lineno <= line <= max(last, statement.lineno)


_FARTHEST = 4  # calls between where a part is made and where it meets the other


def bindings_of(script: Script, call: ast.Call, part: Part) -> list[Binding]:
    """Return all names that a part certainly goes under, the nearest to its making first.

    It is followed where there is one way only: a function that returns it, called once; a class
    that is made once with it as an argument; an attribute that a method sets, called once. Of
    several calls that return a loader, the one with "train" in the name counts.

    Args:
        script: the script.
        call: what makes the part.
        part: which one it is.
    """
    found: list[Binding] = []
    todo = list(_first(script, call, part))
    for _ in range(_FARTHEST):
        known = {(one.scope, one.name) for one in found}
        new = [one for one in todo if (one.scope, one.name) not in known]
        found += new
        todo = [after for one in new for after in _onward(script, one, part)]
    return found


def _first(script: Script, call: ast.Call, part: Part) -> Iterator[Binding]:
    statement = script.statement_of(call)
    scope = script.scope_of(call)
    if script.called(call) == SHARD:
        yield from _sharded(script, scope)
        return
    if isinstance(statement, ast.Return):
        if _is_value(script, statement.value, call):
            yield from _returned(script, scope, None, part)
        return
    if _is_value(script, getattr(statement, "value", None), call):
        for target in targets(statement):
            if name := dotted(target):
                yield Binding(scope, statement, name)


def _is_value(script: Script, value: ast.AST | None, call: ast.Call) -> bool:
    """Return whether a value is what a call returns: itself, compiled, moved, or on a condition."""
    if value is call:
        return True
    if isinstance(value, ast.IfExp):
        return _is_value(script, value.body, call) or _is_value(script, value.orelse, call)
    if isinstance(value, ast.Call):
        if script.called(value) == "compile" and value.args:
            return _is_value(script, value.args[0], call)
        if isinstance(value.func, ast.Attribute) and value.func.attr in ("to", "cuda", "train"):
            return _is_value(script, value.func.value, call)
    return False


def _sharded(script: Script, scope: Scope) -> Iterator[Binding]:
    """Yield the name of the whole model that a scope shards, its layers left out."""
    names: dict[str, ast.stmt] = {}
    for node in script.within(scope):
        if isinstance(node, ast.Call) and script.called(node) == SHARD and node.args:
            name = dotted(node.args[0])
            if name and not script.is_in_loop(node):
                names[name] = script.statement_of(node)
    whole = [name for name in names if not any(name.startswith(f"{one}.") for one in names)]
    if len(whole) == 1:
        statement = names[whole[0]]
        again = [dotted(target) for target in targets(statement)]
        yield Binding(scope, statement, next(filter(None, again), whole[0]))


def _onward(script: Script, binding: Binding, part: Part) -> Iterator[Binding]:
    """Yield under which names a part continues in other functions."""
    scope = binding.scope
    if binding.name.startswith("self."):
        yield from _set_by_method(script, binding)
        return
    if not isinstance(scope, ast.Module):
        for place in _places_in_return(script, scope, binding.name):
            yield from _returned(script, scope, place, part)
    yield from _handed_on(script, binding)


def _places_in_return(script: Script, scope: Scope, name: str) -> list[int | None]:
    """Return where in a returned tuple a name is, None for all of it; nothing where that varies."""
    places: list[int | None] = []
    for one in script.within(scope):
        if isinstance(one, ast.Return):
            found = _places(one.value, name)
            if len(found) != 1 or (places and places != found):
                return []
            places = found
    return places


def _places(value: ast.expr | None, name: str) -> list[int | None]:
    if isinstance(value, ast.Tuple):
        return [place for place, item in enumerate(value.elts) if dotted(item) == name]
    return [None] if value is not None and dotted(value) == name else []


def _returned(script: Script, scope: Scope, place: int | None, part: Part) -> Iterator[Binding]:
    """Yield the name that a caller of a function gives to what it returns."""
    if isinstance(scope, ast.Module):
        return
    found: list[Binding] = []
    calls = _calls_of(script, scope)
    if part == "model" and len(calls) > 1:
        return  # several models, whatever becomes of each
    for call in calls:
        statement = script.statement_of(call)
        if not _is_value(script, getattr(statement, "value", None), call):
            continue
        if isinstance(statement, ast.Return) and place is None:
            found += _returned(script, script.scope_of(call), None, part)
        names = [_item(target, place) for target in targets(statement)]
        found += [Binding(script.scope_of(call), statement, name) for name in names if name]
    if len(found) > 1 and part == "loader":
        found = [one for one in found if "train" in one.name.lower()]
    if len(found) == 1:
        yield found[0]


def _item(target: ast.expr, place: int | None) -> str | None:
    if place is None:
        return dotted(target)
    is_long_enough = isinstance(target, ast.Tuple) and len(target.elts) > place
    return dotted(target.elts[place]) if is_long_enough else None  # type: ignore[attr-defined]


def _calls_of(script: Script, function: Function) -> list[ast.Call]:
    owner = script.class_of(function)
    wanted = function.name if owner is None else f"self.{function.name}"
    calls = [call for call in script.calls() if dotted(call.func) == wanted]
    if owner is None:
        return calls
    return [call for call in calls if owner in script.above(call)]


def _set_by_method(script: Script, binding: Binding) -> Iterator[Binding]:
    """Yield the attribute after the one call of the method that sets it."""
    if isinstance(binding.scope, ast.Module) or script.class_of(binding.scope) is None:
        return
    calls = _calls_of(script, binding.scope)
    if len(calls) == 1:
        yield Binding(script.scope_of(calls[0]), script.statement_of(calls[0]), binding.name)


def _handed_on(script: Script, binding: Binding) -> Iterator[Binding]:
    """Yield the parameter that a part becomes in the one call that it is handed to."""
    for call in [node for node in script.within(binding.scope) if isinstance(node, ast.Call)]:
        function = _defined(script, call)
        if function is None or script.is_in_loop(call):
            continue
        name = _parameter(script, function, call, binding.name)
        if name is not None:
            yield Binding(function, None, name)
            yield from _kept(script, function, name)


def _defined(script: Script, call: ast.Call) -> Function | None:
    """Return the function of the module, or the class's ``__init__``, that only this call calls."""
    name = dotted(call.func)
    if name is None or sum(dotted(other.func) == name for other in script.calls()) != 1:
        return None
    for node in script.tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    return method
    return None


def _parameter(script: Script, function: Function, call: ast.Call, name: str) -> str | None:
    """Return the parameter that an argument of this name becomes; None if there is none."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    names = names if script.class_of(function) is None else names[1:]
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    given = dict(zip(names, call.args, strict=False))
    given |= {one.arg: one.value for one in call.keywords if one.arg is not None}
    found = [one for one, value in given.items() if dotted(value) == name]
    return found[0] if len(found) == 1 else None


def _kept(script: Script, function: Function, name: str) -> Iterator[Binding]:
    """Yield the attribute that a constructor keeps a parameter as."""
    found = [
        Binding(function, node, kept, former=name)
        for node in script.within(function)
        if isinstance(node, ast.Assign) and dotted(node.value) == name
        for target in node.targets
        if (kept := dotted(target)) and kept.startswith("self.")
    ]
    if len(found) == 1:
        yield found[0]
