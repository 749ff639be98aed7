"""Training loops as people write them: a table of what has to be exact, whatever the order.

Each is one function that gets model, loader, optimizer and a ``Run``, and reads like the script
that it stands for. The tests run all of them balanced, under plans that change at every step, and
compare them with one process that has the whole batch; `benchmarks.loops` asks whether the sizes
come near the best ones.
"""

from . import accumulating, batches, fetching, several_models, within
from ._pattern import GLOBAL_BATCH_SIZE, Alone, Balanced, Pattern, Run
from ._trial import Trial

PATTERNS = {
    pattern.name: pattern
    for module in (fetching, accumulating, several_models, batches, within)
    for pattern in module.PATTERNS
}

__all__ = [
    "GLOBAL_BATCH_SIZE",
    "PATTERNS",
    "Alone",
    "Balanced",
    "Pattern",
    "Run",
    "Trial",
]
