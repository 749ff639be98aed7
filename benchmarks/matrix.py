"""Uneven plans in every combination that people train with, each beside one process.

96 cells: DDP or FSDP2, a plain loop or accumulation by size or by count, double precision or bf16
autocast, eager or compiled, means over samples or over tokens, clipped or not. Three ranks train
four steps of 14 + 6 + 4 samples. Compared are their gradients (and in double precision the norm
before clipping) with those of one uncompiled process in double precision; in bf16 also those of
plain training at the equal split, compiled alike and weighted exactly.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import product

from benchmarks._common import Row, main, progress
from evenstep.testing import run_workers
from tests.torch.matrix import COVERING, EVERY, WORLD_SIZE, Case, Errors, errors_of

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

EXACT = 1e-12
NO_WORSE = 1.2


def measured(rank: int, cases: list[Case], backend: str) -> list[Errors]:
    """Return the errors of some cells, and say on rank 0 which one is on."""
    found = []
    for number, case in enumerate(cases, start=1):
        if rank == 0:
            progress(f"{number} of {len(cases)}: {case}")
        found.append(errors_of(case, rank, backend))
    return found


def row(what: str, cases: list[Case], backend: str) -> Row:
    """Return the worst of a group of cells, and which they are."""
    found = run_workers(WORLD_SIZE, measured, cases, backend, timeout_s=3600)[0]
    exact, ratios, plain = {}, {}, []
    for case, (ours, equal) in zip(cases, found, strict=True):
        if equal is None:
            exact[case] = ours
        else:
            ratios[case] = ours / equal
            plain.append(equal)
    largest, highest = max(exact, key=exact.__getitem__), max(ratios, key=ratios.__getitem__)
    return Row(
        what=f"{what}: {len(cases)} cells",
        bar=f"fp64 error <= {EXACT:g}, AMP error <= {NO_WORSE:g} x plain AMP's at the equal split",
        measured={
            "largest_fp64_error": exact[largest],
            "of": str(largest),
            "amp_ratios": (min(ratios.values()), ratios[highest]),
            "highest_of": str(highest),
            "plain_amp_errors": (min(plain), max(plain)),
        },
        met=exact[largest] <= EXACT and ratios[highest] <= NO_WORSE,
    )


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Answer by wrapper, by compilation and by what the loss is a mean over."""
    cells, backend = (COVERING, "aot_eager") if options.quick else (EVERY, "inductor")
    for wrap, compiled, tokens in product(("ddp", "fsdp2"), (False, True), (False, True)):
        words = (wrap, backend if compiled else "eager", "tokens" if tokens else "samples")
        group = [
            case
            for case in cells
            if (case.wrap, case.compiled, case.tokens) == (wrap, compiled, tokens)
        ]
        progress(", ".join(words))
        yield row(", ".join(words), group, backend)


if __name__ == "__main__":
    main(__doc__, rows)
