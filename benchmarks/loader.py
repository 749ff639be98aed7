"""What fetching ahead costs when plans change at every step, against torch's own loader.

Two ranks with four loader workers each, prefetch 4, items that take 5 ms by sleeping; computing
is emulated by sleeping. The plan of a step becomes known at its plan point, no earlier.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

import numpy as np

from evenstep.testing import run_workers

from ._common import Row, main, progress
from ._loader_run import Measured, Setting, run_rank


def rows(options: Namespace) -> Iterator[Row]:
    """Return one row for every promise."""
    rounds, steps = (2, 20) if options.quick else (6, 40)
    setting = Setting(steps=steps, rounds=rounds)
    progress(f"{2 * rounds} epochs of {steps} steps of {setting.compute_s:g} s")
    ranks: list[Measured] = run_workers(2, run_rank, setting, timeout_s=600)
    yield from _promises(ranks, setting)
    yield _step_time(ranks, "with a step of 100 ms", bar=1.05)

    tight = Setting(steps=steps, rounds=rounds, compute_s=0.05)
    progress("the same with a step of 50 ms: a batch of 48 alone takes the workers 60 ms")
    yield _step_time(run_workers(2, run_rank, tight, timeout_s=600), "with a step of 50 ms")


def _promises(ranks: list[Measured], setting: Setting) -> Iterator[Row]:
    length = setting.steps * setting.global_batch_size
    wrong = 0
    for epoch in range(setting.rounds):
        seen = Counter(index for rank in ranks for index in rank.indices[epoch])
        wrong += sum(seen[index] != 1 for index in range(length))
    yield Row("samples not read exactly once an epoch", "0", {"samples": wrong}, wrong == 0)

    late = sum(rank.sizes_differ for rank in ranks)
    yield Row("steps whose batch is not the newest plan's", "0", {"steps": late}, late == 0)

    unused = sum(rank.requested - rank.used for rank in ranks)
    changed = sum(rank.changed_hands for rank in ranks)
    figures = {
        "requested": sum(rank.requested for rank in ranks),
        "unused": unused,
        "changed_hands": changed,
        "ratio": unused / changed,
    }
    yield Row("requested and not used, over those that changed hands", "<= 1.1", figures,
              unused <= 1.1 * changed)  # fmt: skip


def _step_time(ranks: list[Measured], what: str, bar: float | None = None) -> Row:
    stock, balanced = (np.median([ranks[0].stock_s, ranks[0].balanced_s], axis=1)).tolist()
    ratio = balanced / stock
    waited_ms = 1000 * np.quantile([rank.waited_s for rank in ranks], [0.5, 0.95, 1])
    figures = {
        "stock_s": stock,
        "balanced_s": balanced,
        "ratio": ratio,
        "ratio_of_means": float(np.mean(ranks[0].balanced_s) / np.mean(ranks[0].stock_s)),
        "waited_ms_median_p95_max": waited_ms.tolist(),
        "pairs": len(ranks[0].stock_s),
    }
    met = None if bar is None else ratio <= bar
    return Row(f"step time over torch's loader, {what}", f"<= {bar}" if bar else "reported",
               figures, met)  # fmt: skip


if __name__ == "__main__":
    main(__doc__ or "", rows)
