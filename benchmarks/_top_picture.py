"""Draw `docs/images/top.svg`: `python -m benchmarks._top_picture` trains, and pictures the run.

Four ranks of unlike speeds train for some seconds under the policy `auto`; rank 2 reads its samples
from a slow disk, which is emulated by sleeping, as computing is. The picture is what
`evenstep top --once` shows of that very run.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path
from time import sleep

import torch
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from benchmarks._common import progress
from benchmarks._sleepers import Sleeper
from evenstep._top import FileSource, TopView
from evenstep.testing import run_workers
from evenstep.torch import Balancer, Runtime

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "top.svg"
WIDTH = 100
SLOPE_S = (0.002, 0.003, 0.002, 0.008)
READ_S = (0.0, 0.0, 0.002, 0.0)
NUM_STEPS, BATCH_SIZE = 60, 16


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
        for x in batches:
            balanced(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def picture(folder: Path, title: str) -> str:
    """Return an SVG of a run as it stands, which asks no network for a font."""
    source = FileSource(folder)
    while source.update(within_s=1.0):
        pass
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(TopView(source.run, title, source.remark, fits=False))
    svg = console.export_svg(title=f"evenstep top {title}", unique_id="top")
    return re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)


def main() -> None:
    """Train in a temporary folder, or take the run that is given, and write the picture."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        if len(sys.argv) < 2:
            progress(f"training {NUM_STEPS} steps on {len(SLOPE_S)} ranks")
            run_workers(len(SLOPE_S), train, str(folder))
        PICTURE.write_text(picture(folder, "runs/first"), encoding="utf-8")


if __name__ == "__main__":
    main()
