"""Draw `docs/images/report.png`: `python -m benchmarks._report_picture` trains, and pictures it.

Four ranks of unlike speeds train for half a minute under the policy `auto`. Rank 1 reads its
samples from a slow disk, and rank 2 slows down half way; both are emulated by sleeping, as
computing is. The pictures are of the page that `evenstep report` makes of that very run: on a wide
screen, and on a phone in the dark.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import sleep
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks._common import progress
from benchmarks._headless import missing, opened
from benchmarks._sleepers import Sleeper
from evenstep._report import page, read_figures
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SLOPE_S = (0.002, 0.003, 0.002, 0.008)
SLOWER = 2.5  # times the seconds of a sample, on rank 2 from half of the run on
READ_S = (0.0, 0.001, 0.0, 0.0)
NUM_STEPS, BATCH_SIZE = 300, 16


class _Disk(Dataset[torch.Tensor]):
    """Samples, each of which takes its time to be read."""

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s

    def __len__(self) -> int:
        return NUM_STEPS * BATCH_SIZE * len(SLOPE_S)

    def __getitem__(self, at: int) -> torch.Tensor:
        sleep(self._read_s)
        return torch.full((8,), float(at % 7))


def train(rank: int, folder: str) -> None:
    """Train one rank."""
    model = Sleeper(0.01, SLOPE_S[rank], width=8)
    loader = DataLoader(_Disk(READ_S[rank]), batch_size=BATCH_SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Balancer(runtime=Runtime(run_dir=folder, line_every=None)) as balancer:
        balanced, batches = balancer.prepare(model, loader)
        for step, x in enumerate(batches):
            if rank == 2 and step > NUM_STEPS // 2:
                sleep((SLOWER - 1) * SLOPE_S[rank] * len(x))
            balanced(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def take(path: Path) -> None:
    """Write the pictures of a page."""
    views: dict[str, dict[str, Any]] = {
        "report": {"width": 1000, "height": 2480},
        "report-phone": {"width": 390, "height": 1200, "dark": True},
    }
    for name, view in views.items():
        with opened(path, **view) as (shown, _):
            if view.get("dark"):
                shown.locator("#a-time").scroll_into_view_if_needed()
                shown.evaluate("document.getElementById('a-time').scrollIntoView()")
            shown.screenshot(path=IMAGES / f"{name}.png")


def main() -> None:
    """Train in a temporary folder, or take the run that is given, and write the pictures."""
    if why := missing():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary) / "first"
        if len(sys.argv) < 2:
            progress(f"training {NUM_STEPS} steps on {len(SLOPE_S)} ranks")
            run_workers(len(SLOPE_S), train, str(folder))
        path = Path(temporary) / "report.html"
        path.write_text(page([read_figures(folder)], version="", made="just now"), "utf-8")
        take(path)


if __name__ == "__main__":
    main()
