"""The random states that data sets draw from: torch's, numpy's and Python's."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def same_chance() -> Iterator[None]:
    """Keep the random states of torch, numpy and Python as they are, whatever is drawn inside."""
    python, own = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy.random")
    legacy = None if numpy is None else numpy.get_state()
    on_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(own)
        if numpy is not None:
            numpy.set_state(legacy)
        if on_cuda is not None:
            torch.cuda.set_rng_state(on_cuda)


def seed_all(seed: int) -> None:
    """Seed what data sets draw from, alike on all ranks; no device is initialised."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy.random")) is not None:
        with suppress(TypeError, RuntimeError):  # of a bit generator of the script's own
            numpy.seed(seed % (1 << 32))
