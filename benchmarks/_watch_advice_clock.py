"""What the scripts that are watched share: how long they train, and the clock of their steps."""

from __future__ import annotations

from time import perf_counter, process_time

NUM_STEPS, LEARNT, BATCH = 90, 30, 16  # samples of a rank


class Clock:
    """Notes when steps end, and the CPU time so far."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Note both."""
        self.ends.append((perf_counter(), process_time()))

    def say(self, sleep_s: float) -> None:
        """Print means of the steps after those in which evenstep learns.

        Args:
            sleep_s: for which this rank sleeps in a step with equal parts.
        """
        first, last = self.ends[LEARNT], self.ends[-1]
        step_s, cpu_s = ((last[at] - first[at]) / (len(self.ends) - LEARNT - 1) for at in (0, 1))
        print(f"step_s {step_s:.6f}\nsleep_over_cpu {sleep_s / cpu_s:.2f}", flush=True)
