"""How many bytes of gradients went over a rank's links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Bytes of gradients and sums since the start, headers apart.

    Attributes:
        sent_bytes, received_bytes: over the links of this rank.
    """

    sent_bytes: int
    received_bytes: int


@final
class Ledger:
    """Counts on the issuing thread, and is read on any other."""

    def __init__(self) -> None:
        self._sent_bytes = 0
        self._received_bytes = 0

    def sent(self, num_bytes: int) -> None:
        """Note that so much was sent."""
        self._sent_bytes += num_bytes

    def received(self, num_bytes: int) -> None:
        """Note that so much came."""
        self._received_bytes += num_bytes

    @property
    def traffic(self) -> LinkTraffic:
        """What went over this rank's links so far."""
        return LinkTraffic(self._sent_bytes, self._received_bytes)
