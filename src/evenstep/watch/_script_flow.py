"""Follows a model or a loader through a script: returned, kept by an object, handed on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ._script_names import SHARD, Binding, Function, Part, Scope, Script, dotted, targets

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
        new = [one for one in todo if not any(_same(one, other) for other in found)]
        found += new
        todo = [after for one in new for after in _onward(script, one, part)]
    return found


def _same(one: Binding, other: Binding) -> bool:
    return one.scope is other.scope and one.name == other.name


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
    """Yield under which names a part goes on in other functions."""
    scope = binding.scope
    if isinstance(scope, ast.Module):
        yield from _handed_on(script, binding)
        return
    if binding.name.startswith("self."):
        yield from _set_by_method(script, binding)
    else:
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
    assert not isinstance(binding.scope, ast.Module)
    if script.class_of(binding.scope) is None:
        return
    calls = _calls_of(script, binding.scope)
    if len(calls) == 1:
        yield Binding(script.scope_of(calls[0]), script.statement_of(calls[0]), binding.name)


def _handed_on(script: Script, binding: Binding) -> Iterator[Binding]:
    """Yield the parameter that a part becomes in the one call that it is handed to."""
    if binding.name.startswith("self."):
        return
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
