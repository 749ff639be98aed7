"""A training script as a syntax tree: under which names its model and its loader go, and where."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
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
        self._imported = dict(_imports(self.tree))

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

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that a node is in."""
        if isinstance(node, ast.stmt):
            return node
        return next(one for one in self.above(node) if isinstance(one, ast.stmt))

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
        found = []
        for one in self.above(statement):
            if isinstance(one, _SCOPES):
                break
            if isinstance(one, ast.stmt):
                found.append(one)
        return found

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that one stands in."""
        above = self._above[statement]
        blocks = [value for _, value in ast.iter_fields(above) if isinstance(value, list)]
        return next(block for block in blocks if any(one is statement for one in block))

    def is_in_loop(self, node: ast.AST) -> bool:
        """Return whether a loop of its own function runs it several times."""
        for one in self.above(node):
            if isinstance(one, _SCOPES):
                return False
            if isinstance(one, _LOOPS):
                return True
        return False

    def calls(self) -> Iterator[ast.Call]:
        """Yield all calls, in order of their lines."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return iter(sorted(found, key=lambda call: (call.lineno, call.col_offset)))

    def called(self, call: ast.Call) -> str:
        """Return the last name of what is called, as it is called where it comes from."""
        name = (dotted(call.func) or "").rpartition(".")[2]
        return self._imported.get(name, name) if isinstance(call.func, ast.Name) else name

    def uses(self, word: str) -> bool:
        """Return whether a name occurs anywhere, or a module of this name is imported."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id == word:
                return True
            if isinstance(node, ast.Attribute) and node.attr == word:
                return True
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [alias.name for alias in node.names]
                modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                if any(module.partition(".")[0] == word for module in modules):
                    return True
        return False

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


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name
