"""Answer one cell of ``benchmarks.gpu``: ``python -m benchmarks._gpu_cell NAME``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import _gpu_faults, _gpu_ranks, _gpu_steps
from benchmarks._common import printing_elsewhere
from benchmarks._gpu_device import Effort, NotRun, device_of, facts

MACHINE = "machine"
"""Not a cell of its own: says what the others were measured on."""
NO_BAR = "reported"


@dataclass(frozen=True)
class Cell:
    """One question.

    Attributes:
        ask: answers it: a dict with ``headline``, and ``met`` where it has a bar.
        bar: in words.
    """

    ask: Callable[[torch.device, Effort], dict[str, Any]]
    bar: str = NO_BAR


CELLS: Mapping[str, Cell] = {
    "overhead-1": Cell(partial(_gpu_ranks.overhead, world_size=1)),
    "overhead-2": Cell(partial(_gpu_ranks.overhead, world_size=2)),
    "unlike-ranks": Cell(_gpu_ranks.unlike_ranks),
    "beside-cpu": Cell(_gpu_ranks.beside),
    "freshness": Cell(_gpu_steps.freshness, "on CUDA, one rank: the host waits nowhere"),
    "exactness": Cell(_gpu_steps.exactness, f"relative error <= {_gpu_steps.EXACT:g}"),
    "out-of-memory": Cell(_gpu_faults.out_of_memory, "runs out, and the parameters stay the same"),
    "hang": Cell(_gpu_faults.hang, "the other rank ends, and names it"),
}
"""Every cell, in the order in which they run."""


def answered(name: str, asked: str, *, quick: bool) -> dict[str, Any]:
    """Return what a cell, or ``MACHINE``, found; or ``not_run`` with a reason.

    Args:
        name: of the cell.
        asked: which device; see ``device_of``.
        quick: small sizes and few repetitions, as on a CPU always.
    """
    device = device_of(asked)
    if name == MACHINE:
        return facts(device)
    try:
        return CELLS[name].ask(device, Effort(small=quick or device.type == "cpu"))
    except NotRun as error:
        return {"not_run": str(error)}


def main() -> None:
    """Print the answer as JSON on standard output, and nothing else there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cell", choices=[MACHINE, *CELLS])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with printing_elsewhere():
        found = answered(options.cell, options.device, quick=options.quick)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
