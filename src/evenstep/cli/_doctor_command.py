"""``evenstep doctor``: what is wrong with the ranks of this machine, or of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from .._install import install_line
from ._common import fail, least, within

Ranks = Annotated[
    int | None, typer.Option(help="Ranks to start on this machine (default: one per GPU, or 1).")
]
StepName = Annotated[
    str | None,
    typer.Option("--step", help="Your own step: MODULE:FUNCTION or FILE.py:FUNCTION."),
]
Total = Annotated[
    int | None,
    typer.Option(help="Samples per step of all ranks (default: 32 per rank, 512 on GPUs)."),
]
Out = Annotated[Path | None, typer.Option(help="File to write, for `evenstep plan --doctor`.")]


def doctor(
    nproc_per_node: Ranks = None,
    step: StepName = None,
    global_batch_size: Total = None,
    out: Out = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Say in a minute what is wrong with machines and links, and what plain training wastes.

    It starts the ranks of this machine. On several machines, start it on each as your training:
    `torchrun --nnodes 2 ... -m evenstep.doctor`, with the same options.
    """
    try:
        from ..doctor._command_line import main, parsed
    except ModuleNotFoundError as error:
        fail(f"`evenstep doctor` needs {error.name}: `{install_line('torch')}`.", 1)
    words = [*(["--step", step] if step is not None else [])]
    if global_batch_size is not None:
        words += ["--global-batch-size", str(global_batch_size)]
    words += ["--out", str(out)] if out is not None else []
    words += ["--json"] if json else []
    if "RANK" in os.environ:  # under torchrun already
        raise typer.Exit(main(words))
    try:
        ranks = _ranks(nproc_per_node)
        within("doctor", "--nproc-per-node", ranks, 1, 1024, "Each is a process; 1 looks at one.")
        total = ranks if global_batch_size is None else global_batch_size
        least("doctor", "--global-batch-size", total, ranks, "Every rank computes a sample.")
        parsed(words)  # torchrun would report an error by its own traceback
    except ValueError as error:
        fail(str(error), 2)
    raise typer.Exit(main(words) if ranks == 1 else _torchrun(ranks, words))


def _ranks(given: int | None) -> int:
    if given is not None:
        return given
    import torch

    return max(1, torch.cuda.device_count())


def _torchrun(ranks: int, words: list[str]) -> int:
    """Run it on so many ranks of this machine, and return the exit code."""
    # localhost: the machine's own name need not resolve, on a laptop say.
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    command = [sys.executable, *torchrun, f"--nproc-per-node={ranks}", "-m", "evenstep.doctor"]
    return subprocess.run([*command, *words], check=False).returncode
