"""Unequal links: as measured, the shares planned for them, and exchanges against prediction."""

from __future__ import annotations

from collections import deque
from typing import final

import numpy as np

from ..events import ExchangeMeasured, LinksMeasured, SharesPlanned
from ._run_figures import LinkFigures
from ._step_bins import StepBins, over

MOST_SHARES = 30


@final
class LinkTally:
    """Adds up events on links."""

    def __init__(self, bins: StepBins) -> None:
        self._bins = bins
        self._first: LinksMeasured | None = None
        self._last: LinksMeasured | None = None
        self._num_measured = self._num_shares = self._num_exchanges = 0
        self._shares: deque[SharesPlanned] = deque(maxlen=MOST_SHARES)
        self._sums = bins.sums()  # exchanges, their number, predictions, their number
        self._range = bins.range()

    def add(self, event: LinksMeasured | SharesPlanned | ExchangeMeasured) -> None:
        """Take in the next event."""
        if isinstance(event, LinksMeasured):
            self._first, self._last = self._first or event, event
            self._num_measured += 1
        elif isinstance(event, SharesPlanned):
            self._shares.append(event)
            self._num_shares += 1
        else:
            at = self._bins.at(np.array([event.step], np.int64))
            predicted_s = event.predicted_s
            row = [event.exchange_s, 1, predicted_s or 0.0, predicted_s is not None]
            self._sums.add(at, np.array([row], np.float64))
            self._range.add(at, np.array([event.exchange_s]))
            self._num_exchanges += 1

    def figures(self, num_stretches: int) -> LinkFigures | None:
        """Return all of it, by so many stretches; None where nothing was told."""
        if not (self._num_measured or self._num_shares or self._num_exchanges):
            return None
        sums = self._sums.values[:num_stretches]
        if not sums.size:
            sums = np.zeros((num_stretches, 4))
        return LinkFigures(
            first=self._first,
            last=self._last,
            num_measured=self._num_measured,
            shares=tuple(self._shares),
            num_shares=self._num_shares,
            exchange_s=over(sums[:, 0], sums[:, 1]),
            predicted_s=over(sums[:, 2], sums[:, 3]),
            least_s=self._range.least[:num_stretches],
            most_s=self._range.most[:num_stretches],
        )
