"""Code broken on purpose, and whether the tests that `evidence/seeds.md` cites notice.

An audit found these to survive. Each is made in a copy of the source, where the cited tests have to
fail and everything else stays as it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks._common import ROOT, Row, main, progress


@dataclass(frozen=True)
class Mutant:
    """One place where the source is changed.

    Attributes:
        what: what it breaks.
        file: below ``src/evenstep``.
        old: text that stands there once.
        new: what it is replaced by.
        test: which has to fail.
    """

    what: str
    file: str
    old: str
    new: str
    test: str


_BATCHING = "policies/papers/_dynamic_batching.py"
_NARX = "prediction/_narx.py"
_WEIGHTS = "torch/_step/_reductions.py"
MUTANTS = (
    Mutant(
        "dynamic batching averages on across a resize",
        _BATCHING,
        '        "num_steps": 0,\n        "previous": state["held"]',
        '        "mean_s": state["mean_s"],\n        "num_steps": state["num_steps"],\n'
        '        "previous": state["held"]',
        "tests/policies/test_dynamic_batching.py::test_a_resize_forgets_the_times_before_it",
    ),
    Mutant(
        "dynamic batching has a dead band for each worker",
        _BATCHING,
        "        wanted = apportion(speed, bounds)\n",
        "        small = abs(target - batch_size) / np.maximum(batch_size, 1) <= band\n"
        "        kept = batch_size / batch_size.sum() * speed.sum()\n"
        "        wanted = apportion(np.where(small, kept, speed), bounds)\n",
        "tests/policies/test_dynamic_batching.py::test_the_dead_band_ignores_small_changes",
    ),
    Mutant(
        "Deadband holds each worker by itself",
        "policies/_simple.py",
        "        if 0 < change <= self.threshold:\n",
        "        near = abs(wanted.batch_size - held) / np.maximum(held, 1) <= self.threshold\n"
        "        if not near.all() and near.any():\n"
        "            mixed = refit(np.where(near, held, wanted.batch_size), cluster)\n"
        '            return Decision(mixed, {"held": mixed, "inner": wanted.state}, "mixed")\n'
        "        if 0 < change <= self.threshold:\n",
        "tests/policies/test_equal_and_fixed.py::test_a_deadband_adopts_all_sizes_or_none",
    ),
    Mutant(
        "LB-BSP 2020 moves without a window",
        "policies/papers/_lb_bsp.py",
        'if num_steps < self.window or (num_steps < state["window"] and not changed):',
        "if num_steps < 0:",
        "tests/policies/test_lb_bsp.py::test_jitter_moves_little_because_a_window_is_averaged",
    ),
    Mutant(
        "LBB's rapid step forgets the fixed costs of the profile",
        "policies/papers/_lbb.py",
        "intercept = np.maximum(self.profile.coefficients[:, 3], 0.0)",
        "intercept = np.zeros(len(step_s))",
        "tests/policies/test_lbb.py::test_a_profile_gives_the_first_split_and_the_fixed_costs",
    ),
    Mutant(
        "NARX sees resources one step late",
        _NARX,
        "            row[1:] = resources.free_cpu, np.log1p(resources.free_memory_bytes)\n",
        '            past = globals().setdefault("_past", [])\n'
        "            past.append((resources.free_cpu, np.log1p(resources.free_memory_bytes)))\n"
        "            row[1:] = past[-2:][0]\n",
        "tests/policies/test_lb_bsp.py::test_what_resources_foretell_is_planned_for_in_time",
    ),
    Mutant(
        "NARX ignores resources",
        _NARX,
        "        if resources is not None:\n            row[1:]",
        "        if resources is not None and len(values) == 0:\n            row[1:]",
        "tests/policies/test_lb_bsp.py::test_what_resources_foretell_is_planned_for_in_time",
    ),
    Mutant(
        "gradients count every rank alike",
        _WEIGHTS,
        "weight = num_samples * self._world_size / step.global_num_samples",
        "weight = 1.0 if num_samples else 0.0",
        "tests/torch/test_exact_gradient.py::test_the_gradient_is_that_of_one_process",
    ),
    Mutant(
        "running statistics are averaged without counts",
        "torch/_means.py",
        "_average(buffers, count, side)",
        "_average(buffers, min(count, 1), side)",
        "tests/torch/test_units.py::test_running_statistics_are_the_mean_by_counts",
    ),
    Mutant(
        "what did not fit is planned again",
        "timemodels/_memory_model.py",
        "np.clip(fits + 1e-9, 1, burst - 1)",
        "np.clip(fits + 1e-9, 1, UNSEEN)",
        "tests/timemodels/test_memory.py::test_a_size_that_did_not_fit_is_not_planned_again",
    ),
    Mutant(
        "a worker's free memory is not sent",
        "torch/_step/_reporter.py",
        "= read_by(machine) or (None, 0)",
        "= (read_by(machine) or (None, 0))[0], 1000",
        "tests/torch/test_estimates.py::test_every_workers_machine_is_told_with_its_step",
    ),
    Mutant(
        "links are drawn from the lower half alone",
        "lab/_trace.py",
        "generator.uniform(least, most, size",
        "generator.uniform(least, (least + most) / 2, size",
        "tests/lab/test_trace.py::test_drawn_rates_are_even_in_their_bounds_and_the_seed_s",
    ),
)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Make each mutant, and run its test."""
    cited = (ROOT / "evidence" / "seeds.md").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for place, mutant in enumerate(MUTANTS[:2] if options.quick else MUTANTS):
            progress(f"{place + 1} of {len(MUTANTS)}: {mutant.what}")
            copy = Path(folder, str(place))
            shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
            file = copy / "evenstep" / mutant.file
            text = file.read_text("utf-8")
            count = text.count(mutant.old)
            if count != 1:
                raise LookupError(f"{mutant.file} has {mutant.old!r} {count} times: mend this list")
            whole = _status(copy, mutant.test)
            file.write_text(text.replace(mutant.old, mutant.new), "utf-8")
            broken = _status(copy, mutant.test)
            yield Row(
                mutant.what,
                "the test that evidence/seeds.md cites passes before, and fails now",
                {"test": mutant.test, "before": whole, "after": broken},
                whole == 0 and broken == 1 and mutant.test in cited,
            )


def _status(src: Path, test: str) -> int:
    """Return pytest's exit status of ``test`` with the evenstep in ``src``: 1 for a failure."""
    paths = os.pathsep.join((str(src), str(ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-o", f"pythonpath={src} {ROOT}", test]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False
    ).returncode


if __name__ == "__main__":
    main(__doc__.splitlines()[0], rows)
