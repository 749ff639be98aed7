"""What is private in PyTorch is used in one file alone, which says why, and what holds it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "evenstep"
HOME = SOURCE / "_private_torch.py"
OTHERS = {  # private names of other libraries, and of Python, in files that use torch as well
    "_add_dataloader",  # Accelerate's
    "_current_frames",
    "_fields",  # of named tuples
    "_exit",
    "_loss_shifts_labels",  # the Trainer's
    "_prepare_inputs",  # likewise
    "_remove_dataloader",  # Accelerate's
    "_replace",  # of named tuples
    "_sampler",  # Fabric's, of its own sampler
}


def files():
    """Files that use torch, with what each is parsed to, but for the home of what is private."""
    for file in sorted(SOURCE.rglob("*.py")):
        text = file.read_text("utf-8")
        if file != HOME and re.search(r"^\s*(import|from) torch\b", text, re.M):
            yield file.relative_to(SOURCE).as_posix(), ast.parse(text)


def not_ours(names):
    """Those of some names that evenstep itself gives nothing, in any file."""
    left = set(names)
    for file in SOURCE.rglob("*.py"):
        text = file.read_text("utf-8")
        if not any(name in text for name in left):
            continue  # to parse all of them takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                left.discard(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                left.discard(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                left.discard(node.id)
    return left


def private(name):
    """Tell whether a name is private, and no method of Python's."""
    return name.startswith("_") and not name.startswith("__")


def from_torch(node):
    """Tell whether something of torch's own is imported."""
    return not node.level and (node.module or "").split(".")[0] == "torch"


def test_private_names_of_torch_stand_in_one_file():
    """An attribute that evenstep gives no object of its own, or an import of torch's."""
    used, imported = {}, set()
    for file, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and private(node.attr):
                used.setdefault(node.attr, set()).add(f"{file}: {ast.unparse(node)}")
            if isinstance(node, ast.ImportFrom) and from_torch(node):
                words = [*node.module.split("."), *(alias.name for alias in node.names)]
                imported |= {f"{file}: {node.module}.{word}" for word in words if private(word)}

    assert imported == set()
    assert [used[name] for name in not_ours(used.keys() - OTHERS)] == []


def test_each_names_tests_that_are_there():
    """In brackets, at the end of its reason."""
    text = HOME.read_text("utf-8")
    named = {name for group in re.findall(r"\[(test_[^\]]*)\]", text) for name in group.split()}
    names = {re.sub(r"[^\w.]", "", name) for name in named if name.startswith("test_")}

    assert len(re.findall(r"\[test_", text)) >= 20
    assert all(list((ROOT / "tests").rglob(name)) for name in names), names
