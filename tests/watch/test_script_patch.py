"""The change of a script is right, or there is none."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.watch import _advice_text

from .._aborts import run
from .._ranks import printed
from ._scripts import BY_NAME, SHAPES, read

ROOT = Path(__file__).parents[2]


def patched(text, path, **lines):
    """What is said of a script."""
    return read(_advice_text.patched(text, path, **lines))


def patch_of(shape):
    """The change of a script, with the lines of its parts as a watch gives them."""
    return patched(shape.text, "train.py", **shape.lines)


def changed(text, diff, folder):
    """The script with the change, made by git as a user would."""
    (folder / "train.py").write_bytes(text.encode())
    (folder / "change.diff").write_bytes(diff.encode())
    command = ["git", "apply", "--unsafe-paths", "change.diff"]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment)
    return (folder / "train.py").read_bytes().decode()


def between(text, *, model, loader):
    """What becomes of a script whose parts are made on the lines that have these words."""
    numbered = list(enumerate(text.splitlines(), 1))
    first = {name: next(n for n, line in numbered if name in line) for name in (model, loader)}
    return patched(text, "train.py", model_line=first[model], loader_line=first[loader])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.file)
def test_three_lines_come_in_the_right_places(shape, tmp_path):
    """Scripts as they are published: three lines more, none changed, after both parts are made."""
    after = changed(shape.text, patch_of(shape).diff, tmp_path)

    ast.parse(after)
    lines, before = after.splitlines(), shape.text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.endswith("= Balancer()"))
    balancer = lines[at].split("=")[0].strip()
    kept = [line for n, line in enumerate(lines) if n not in (at, at + 1)]
    kept.remove("from evenstep.torch import Balancer")
    assert kept == before
    assert lines[at - 1].endswith(shape.after)
    prepared = f"{shape.prepared} = {balancer}.prepare({shape.prepared})"
    assert lines[at + 1].strip() == prepared


def test_a_name_that_is_taken_stays_the_users(tmp_path):
    """A script with a `balancer` of its own gets another one."""
    shape = BY_NAME["loader_functions"]

    after = changed(shape.text, patch_of(shape).diff, tmp_path)

    assert "evenstep_balancer = Balancer()" in after
    assert 'balancer = "a name that is taken"' in after


def test_lines_end_as_they_did(tmp_path):
    """A script from Windows stays one."""
    shape = BY_NAME["mnist"]
    text = shape.text.replace("\n", "\r\n")

    after = changed(text, patched(text, "train.py", **shape.lines).diff, tmp_path)

    assert after.count("\n") == after.count("\r\n") == text.count("\n") + 3


def test_tabs_and_a_missing_last_newline_stay(tmp_path):
    """What is added looks like what is there."""
    shape = BY_NAME["experiment_class"]
    text = shape.text.replace("    ", "\t").rstrip("\n")

    after = changed(text, patched(text, "train.py", **shape.lines).diff, tmp_path)

    ast.parse(after)
    assert "\n\t\tself.balancer = Balancer()\n" in after
    assert not after.endswith("\n")


def test_a_last_line_without_an_end_is_no_obstacle(tmp_path):
    """Not even where it is in the diff, or what the change follows."""
    text = "model = DDP(net)\nloader = DataLoader(data)\ngo(loader)"

    for script in (text, text.removesuffix("\ngo(loader)")):
        after = changed(script, between(script, model="DDP(", loader="DataLoader(").diff, tmp_path)
        assert "\nbalancer = Balancer()\nmodel, loader = " in after


def test_a_script_elsewhere_is_changed_in_its_own_folder(tmp_path):
    """The script's path is absolute: the diff has its name, and the folder to apply it in."""
    shape = BY_NAME["mnist"]
    folder = tmp_path / "project"
    folder.mkdir()

    patch = patched(shape.text, str(folder / "train.py"), **shape.lines)
    after = changed(shape.text, patch.diff, folder)

    assert patch.where == f"the change, for `git apply` in {folder}"
    assert f"= balancer.prepare({shape.prepared})" in after


def test_a_line_of_one_layer_leads_to_the_whole_model():
    """`fully_shard` of layers in a loop is a part of it; that the loop changes as well is said."""
    shape = BY_NAME["fsdp2"]
    layer = shape.line_of("fully_shard(layer")

    patch = patched(shape.text, "t.py", model_line=layer, loader_line=shape.line_of(shape.loader))

    assert (
        patch.diff
        == patched(
            shape.text,
            "t.py",
            model_line=shape.line_of(shape.model),
            loader_line=shape.line_of(shape.loader),
        ).diff
    )
    assert "loader.steps()" in patch.to_do[0]


UNCERTAIN = {
    "a loader made in every epoch": (
        "model = DDP(net)\nfor epoch in range(2):\n    loader = DataLoader(data)\n"
    ),
    "a loader made in a function that every epoch calls": (
        "def train_epoch(model):\n    loader = DataLoader(data)\n\n"
        "def main():\n    model = DDP(net)\n    for epoch in range(2):\n"
        "        train_epoch(model)\n"
    ),
    "a loader that an iterator has already": (
        "loader = DataLoader(data)\nbatches = iter(loader)\nmodel = DDP(net)\n"
    ),
    "a loader that another object keeps": (
        "loader = DataLoader(data)\nengine = Engine(loader)\nmodel = DDP(net)\n"
    ),
    "a loader in a dictionary": "model = DDP(net)\nloaders = {'train': DataLoader(data)}\n",
    "a loader in something else": "model = DDP(net)\nloader = prefetch(DataLoader(data))\n",
    "two statements on a line": "model = DDP(net)\nloader = DataLoader(data); go()\n",
    "a branch on one line": "loader = DataLoader(data)\nif ddp: model = DDP(net)\n",
    "a loader in a branch": "if big:\n    loader = DataLoader(data)\nmodel = DDP(net)\n",
    "a function that is called twice": (
        "def make(data):\n    return DataLoader(data)\n\none = make(1)\ntwo = make(2)\n"
        "model = DDP(net)\n"
    ),
    "a function that makes two models": (
        "def wrap(net):\n    return DDP(net)\n\nmodel = wrap(one)\nothers.append(wrap(two))\n"
    ),
    "a class that is made twice": (
        "class T:\n    def __init__(self, data):\n        self.data = data\n"
        "        self.model = DDP(net)\n\nloader = DataLoader(data)\nT(loader)\nT(other)\n"
    ),
    "parts that never meet": (
        "def one():\n    model = DDP(net)\n\ndef two():\n    loader = DataLoader(data)\n"
    ),
    "a function with two returns": (
        "def make():\n    if x:\n        return None\n    loader = DataLoader(data)\n"
        "    return loader\n\nloader = make()\nmodel = DDP(net)\n"
    ),
    "a parameter that is kept and used": (
        "class T:\n    def __init__(self, loader):\n        self.loader = loader\n"
        "        self.model = DDP(net)\n        self.batches = iter(loader)\n\n"
        "T(loader=1)\n"
    ),
    "no Python": "model = DDP(net\nloader = DataLoader(data)\n",
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_where_it_is_not_certain_words_say_what_to_change(name):
    """No diff that might be wrong: the lines are named instead."""
    text = UNCERTAIN[name]
    text += "" if "DataLoader" in text else "loader = DataLoader(data)\n"

    patch = between(text, model="DDP(", loader="DataLoader(")

    assert patch.diff == ""
    assert patch.to_do


def test_branches_that_all_make_a_loader_are_certain():
    """What follows both branches has the loader, whichever ran."""
    text = (
        "if big:\n    loader = DataLoader(one)\nelse:\n    loader = DataLoader(two)\n"
        "model = DDP(net)\n"
    )

    assert "+model, loader = " in between(text, model="DDP(", loader="DataLoader(one").diff


def test_a_script_that_is_balanced_already_is_left_alone():
    """Nothing is added twice."""
    text = "from evenstep.torch import Balancer\nmodel = DDP(net)\nloader = DataLoader(data)\n"

    patch = between(text, model="DDP(", loader="DataLoader(")

    assert (patch.diff, patch.to_do) == ("", ("train.py imports evenstep already",))


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("name", [shape.file for shape in SHAPES if shape.launcher])
def test_the_changed_script_trains(name, tmp_path):
    """As it was started before, on two ranks, to its end."""
    shape = BY_NAME[name]
    after = changed(shape.text, patch_of(shape).diff, tmp_path)
    prepared = f"{shape.prepared} = "
    assert prepared in after
    if shape.launcher == "torchrun":
        text = printed(tmp_path / "train.py", cwd=tmp_path)
    else:
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        ran = run([sys.executable, "train.py"], cwd=tmp_path, env=environment, timeout=150)
        assert ran.returncode == 0, ran.stderr
        text = ran.stdout

    assert text.count("trained") == 2
