"""Peaks of memory: of each step for plans, and of all together for a log."""

from __future__ import annotations

from evenstep.torch import CudaMemory


class Card:
    """A card of 100 bytes, with the statistics that torch keeps of it."""

    def __init__(self):
        self.held = self.peak = 10

    def hold(self, num_bytes):
        self.held = num_bytes
        self.peak = max(self.peak, num_bytes)

    def mem_get_info(self, device):
        return 100 - self.held, 100

    def memory_reserved(self, device):
        return self.held

    def max_memory_allocated(self, device):
        return self.peak

    def reset_peak_memory_stats(self, device):
        self.peak = self.held


def test_the_highest_peak_outlives_the_steps():
    """Torch's own is that of the newest step, whose beginning takes it back."""
    card = Card()
    memory = CudaMemory("cuda:0", cuda=card)
    peaks = []
    for used in (40, 70, 30):
        memory.reset()
        card.hold(used)
        card.hold(10)
        peaks.append(memory.peak_bytes())

    assert memory.capacity_bytes() == 100
    assert peaks == [40, 70, 30]
    assert card.max_memory_allocated("cuda:0") == 30
    assert memory.highest_bytes() == 70


def test_what_was_used_between_two_steps_counts_too():
    """An evaluation, say, whose peak is higher than that of any step."""
    card = Card()
    memory = CudaMemory("cuda:0", cuda=card)
    card.hold(90)
    card.hold(10)
    memory.reset()

    assert memory.highest_bytes() == 90
