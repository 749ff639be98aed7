"""How workers and times are written, the same on the screen and in the picture."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

WORKER_COLORS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#ccbb44", "#aaaaaa")
"""One per rank, then again from the first. Told apart by most colour-blind people (Tol 2021)."""

EQUAL, BALANCED = "#cc3311", "#009988"
"""The equal split and the balanced run."""


def color_of(rank: int) -> str:
    """Return the colour of a worker."""
    return WORKER_COLORS[rank % len(WORKER_COLORS)]


def speed_text(speed: float) -> str:
    """Return a speed as people write it: ``1/3`` rather than 0.333333."""
    near = Fraction(speed).limit_denominator(12)
    return str(near) if abs(float(near) - speed) < 1e-3 * speed else f"{speed:.3g}"


def seconds_text(seconds: float) -> str:
    """Return a step time: ``615 ms``, ``12.3 ms`` or ``2.41 s``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def clock_text(seconds: float) -> str:
    """Return a stretch of time in minutes and seconds: ``1:05``."""
    whole = round(max(0.0, seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def sizes_text(batch_size: Sequence[int]) -> str:
    """Return batch sizes as ``48 + 24 + 16 + 8``."""
    return " + ".join(map(str, batch_size))
