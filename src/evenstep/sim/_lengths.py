"""Lengths of samples: drawn by name, read from a file, or given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from .._types import IntArray
from ..exceptions import invalid

DRAWN = ("fine-tuning", "long-tails", "uniform")
NUM_DRAWN = 1 << 14


def draw_lengths(kind: str, num_samples: int, rng: Generator) -> IntArray:
    """Return lengths in tokens, ``(num_samples,)``.

    ``"fine-tuning"`` and ``"long-tails"`` are log-normal about 245 tokens, with a spread of 0.8
    and 1.5, up to 16,384 tokens; ``"uniform"`` is from 1 to 2,048.
    """
    if kind == "uniform":
        return rng.integers(1, 2049, num_samples)
    spread = {"fine-tuning": 0.8, "long-tails": 1.5}[kind]
    return np.clip(np.exp(rng.normal(5.5, spread, num_samples)), 1, 16384).astype(np.int64)


def read_lengths(path: str | Path) -> IntArray:
    """Return the lengths in a file: a ``.npy`` of integers, or text with one length in a line.

    Raises:
        ValueError: it holds anything else.
        OSError: it cannot be read.
    """
    file = Path(path)
    try:
        if file.suffix == ".npy":
            return checked_lengths(np.load(file, allow_pickle=False))
        return checked_lengths([int(line) for line in file.read_text("utf-8-sig").split()])
    except (ValueError, EOFError) as error:  # no number, no text, or a `.npy` without a byte
        rule = "hold the length of each sample, as text or as `.npy`"
        remedy = "Write one integer in each line."
        raise invalid("read_lengths(path=...)", rule, f"{file} ({error})", remedy) from error


def checked_lengths(values: Any) -> IntArray:
    """Return lengths as integers, ``(num_samples,)``, or raise."""
    found = np.asarray(values)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size or found.min() < 1:
        got = f"{found.dtype} of shape {found.shape}"
        rule = "be integers of at least 1, one for each sample"
        raise invalid("with_lengths(lengths=...)", rule, got, "Count tokens, pixels or nodes.")
    return found.astype(np.int64)
