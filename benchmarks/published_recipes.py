"""Published training scripts, balanced by the diffs of ``docs/recipes/scripts.md``.

``--scripts DIR`` is a folder with clones of the repositories that ``published_watch`` lists without
it; nothing is fetched here. Each script is changed in a copy, by the diff as it stands on the page,
and runs twice, in double precision: on three ranks whose speeds are 1 : 2 : 4, and on one rank with
the same global batches. Speeds are emulated: a forward sleeps for each of its rows. Compared are
the parameters at the end, and the time of a step with the optimum: the shortest time in which the
three ranks can sleep for all rows. A script that runs on one rank in another way, as under
Accelerate, or not at all, is compared with three ranks that have equal parts.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks._common import ROOT, Row, main, progress
from benchmarks._published_run import Ran, commit_of, run
from benchmarks._published_scripts import CHECKOUTS, GPT, NANO, PUBLISHED, TIMM, Published

PAGE = ROOT / "docs" / "recipes" / "scripts.md"
SPEEDS = (1, 2, 4)
MOST_LINES = 5
EXACT = 1e-9
SLOWER = 1.10


@dataclass(frozen=True, slots=True)
class Recipe:
    """A published script, and how it is compared.

    Attributes:
        published: the script.
        diff: the file that is changed, from the name of its repository on.
        together: arguments on three ranks, each with ``batch_size`` samples of an equal split.
        alone: arguments on one rank with the same global batches; None compares with three ranks
            that have equal parts.
        batch_size: of a rank of three, for one forward.
        forwards: of an optimizer step, on a rank.
        inexact: why parameters differ; empty where they do not.
        no_dropout: whether dropout is off; a rank draws it for the samples that it has.
        best_s: the optimum of one forward of each rank, at least five times the processor's time.
    """

    published: Published
    diff: str
    together: str
    alone: str | None
    batch_size: int
    forwards: int = 1
    inexact: str = ""
    no_dropout: bool = False
    best_s: float = 0.4

    def started(self, *, compared: bool) -> Published:
        """Return the script as it is started: balanced, or to be compared with."""
        one, arguments, ranks = self.published, self.together, len(SPEEDS)
        if compared and self.alone is not None:
            arguments, ranks = self.alone, 1
        env = {key: str(ranks) if "DEVICES" in key else text for key, text in one.env.items()}
        return replace(one, arguments=arguments, ranks=ranks, env=env)


def _recipe(
    name: str,
    arguments: str,
    batch_size: int,
    *,
    diff: str = "",
    has_twin: bool = True,
    **more: Any,
) -> Recipe:
    """Return a recipe, with the arguments that a rank's batch size and accumulation need."""
    one = next((one for one in PUBLISHED if one.name == name), None) or MNIST
    together, alone = (
        arguments.format(batch_size=size, micro_steps=ranks * more.get("forwards", 1))
        for size, ranks in ((batch_size, len(SPEEDS)), (len(SPEEDS) * batch_size, 1))
    )
    return Recipe(one, diff or name, together, alone if has_twin else None, batch_size, **more)


_TUTORIAL = "examples/distributed/ddp-tutorial-series"
_GPT = GPT + " gpt_config.embd_pdrop=0 gpt_config.resid_pdrop=0 gpt_config.attn_pdrop=0"
_NANO = (
    NANO + " --dropout=0.0 --batch_size={batch_size} --gradient_accumulation_steps={micro_steps}"
)
_MNIST = "--epochs 2 --batch-size {batch_size}"
MNIST = Published("examples", "mnist", "main.py", stubs=("torchvision",), device="cuda")
RECIPES = (
    _recipe(f"{_TUTORIAL}/multigpu_torchrun.py", "2 1 --batch_size {batch_size}", 32),
    _recipe(f"{_TUTORIAL}/multigpu.py", "2 1 --batch_size {batch_size}", 32),
    _recipe(
        "examples/distributed/minGPT-ddp/mingpt/main.py",
        _GPT + " trainer_config.batch_size={batch_size}",
        64,
        diff="examples/distributed/minGPT-ddp/mingpt/trainer.py",
        best_s=2.4,
    ),
    _recipe("examples/mnist/main.py", _MNIST, 16, no_dropout=True, best_s=5.0),
    _recipe(
        "examples/imagenet/main.py",
        "--dummy --dist-url env:// -j 1 --epochs 2 -b {batch_size}",
        8,
        inexact="batch normalization over a rank's part of a batch",
    ),
    _recipe(
        "examples/distributed/FSDP2/example.py",
        "",
        32,
        has_twin=False,
        best_s=10.0,
    ),
    _recipe("nanoGPT/train.py", _NANO, 8, forwards=2),
    _recipe(
        "accelerate/examples/nlp_example.py",
        "--cpu",
        16,
        has_twin=False,
    ),
    _recipe(
        "accelerate/examples/by_feature/gradient_accumulation.py",
        "--cpu --gradient_accumulation_steps 2",
        16,
        forwards=2,
        has_twin=False,
    ),
    _recipe(
        "pytorch-lightning/examples/fabric/image_classifier/train_fabric.py",
        _MNIST,
        16,
        no_dropout=True,
        best_s=5.0,
    ),
    _recipe(
        "pytorch-image-models/train.py",
        TIMM + " -b {batch_size} --grad-accum-steps 2",
        16,
        forwards=2,
        has_twin=False,
        best_s=2.0,
    ),
)


def diffs(page: Path = PAGE) -> dict[str, str]:
    """Return the diffs of a page, by the path of what they change."""
    blocks = re.findall(r"^```diff\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return {block.splitlines()[0].removeprefix("--- "): block for block in blocks}


def lines_of(diff: str) -> int:
    """Return how many lines of a script a diff changes: those that it adds, or removes if more."""
    lines = diff.splitlines()[2:]
    return max(sum(line.startswith(sign) for line in lines) for sign in "+-")


def optimum_s(num_samples: int, row_s: tuple[float, ...]) -> float:
    """Return the shortest time in which all ranks together sleep for so many rows."""
    ends = sorted(row * number for row in row_s for number in range(1, num_samples + 1))
    return ends[num_samples - 1]


@dataclass(frozen=True, slots=True)
class Edit:
    """Changes the copy of a script as its recipe says.

    Attributes:
        recipe: of the script.
        diff: that makes it balanced.
        equal: whether parts are to stay equal.
    """

    recipe: Recipe
    diff: str
    equal: bool

    def __call__(self, copy: Path) -> None:
        """Change it."""
        one = self.recipe.published
        path = Path(self.recipe.diff).relative_to(Path(one.checkout) / one.folder)
        text = self.diff.replace(self.recipe.diff, f"x/{path}")
        subprocess.run(["git", "apply", "-"], cwd=copy, input=text, text=True, check=True)
        if self.equal:
            script = copy / path
            text = script.read_text("utf-8").replace("Balancer(", 'Balancer(policy="equal", ')
            text = re.sub(r"( balance\(accelerator.*)\)", r'\1, policy="equal")', text)
            script.write_text(text, "utf-8")


def distance(ours: Path, theirs: Path) -> float:
    """Return how far parameters are from one another, over their change in training if any.

    The DDP tutorial's loss over a single class is 0, and it changes nothing.
    """
    one, other = (torch.load(path, weights_only=True) for path in (ours, theirs))
    between, change = (
        torch.cat([(a - b).flatten() for a, b in zip(other["after"], rows, strict=True)]).norm()
        for rows in (one["after"], other["before"])
    )
    return float(between / change if change else between)


def step_s(ran: Ran) -> float:
    """Return the median time of an optimizer step in the second half of a run."""
    times_s = [later - one for one, later in pairwise(ran.steps_s)]
    return median(times_s[len(times_s) // 2 :])


def measured(recipe: Recipe, folder: Path, diff: str) -> Row:
    """Return the row of a recipe."""
    one, what = recipe.published, f"{recipe.published.name}"
    progress(what)
    num_samples = len(SPEEDS) * recipe.batch_size
    per_row_s = recipe.best_s * sum(SPEEDS) / num_samples
    row_s = tuple(per_row_s / speed for speed in SPEEDS)
    best_s = recipe.forwards * optimum_s(num_samples, row_s)
    bar = f"<= {MOST_LINES} lines; <= {EXACT}, or why not; <= {SLOWER} of the optimum"
    figures: dict[str, Any] = {
        "commit": commit_of(folder),
        "lines": lines_of(diff),
        "stubs": [f"CPUs for {one.device}", *one.stubs, *["no dropout"] * recipe.no_dropout],
        "together": recipe.together,
        "alone": recipe.alone,
    }
    with TemporaryDirectory() as name:
        ends = [Path(name, f"{compared}.pt") for compared in (False, True)]
        for compared, path in enumerate(ends):
            started = recipe.started(compared=bool(compared))
            ran = run(
                started,
                folder,
                edit=Edit(recipe, diff, bool(compared)),
                num_devices=started.ranks if one.spawns else len(SPEEDS),  # some refuse one alone
                double=True,
                no_dropout=recipe.no_dropout,
                base_s=0.0,
                row_s=(0.0,) * started.ranks if compared else row_s,
                parameters=str(path),
            )
            if ran.status or not path.exists():
                return Row(what, bar, figures | {f"failed_{compared}": ran.error}, False)
            if compared:
                figures["step_without_sleep_s"] = step_s(ran)
            else:
                figures |= {"step_s": step_s(ran), "optimum_s": best_s, "steps": len(ran.steps_s)}
        figures["distance"] = distance(*ends)
    figures["over_optimum"] = figures["step_s"] / best_s
    exact = figures["distance"] <= EXACT or bool(recipe.inexact)
    met = exact and figures["lines"] <= MOST_LINES and figures["over_optimum"] <= SLOWER
    return Row(what, bar, figures | {"inexact": recipe.inexact}, met)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each script; without a folder, one for each repository that is needed."""
    by_path = diffs()
    if options.scripts is None:
        for name, (url, commit) in CHECKOUTS.items():
            figures = {"url": url, "commit": commit}
            yield Row(f"{name}, in the folder of --scripts", "to be cloned by you", figures)
        return
    for recipe in RECIPES:
        one = recipe.published
        if options.only in one.name:
            yield measured(
                recipe, options.scripts / one.checkout / one.folder, by_path[recipe.diff]
            )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where the scripts are."""
    parser.add_argument("--scripts", type=Path, help="a folder with clones of the repositories")
    parser.add_argument("--only", default="", help="scripts with this in their name")


if __name__ == "__main__":
    main(__doc__ or "", rows, add_options)
