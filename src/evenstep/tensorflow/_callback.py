"""The one callback of ``model.fit``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import keras


@final
class BalancerCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells a balancer which epoch ``fit`` is in, so that one that is resumed goes on there.

    Made by ``Balancer.callback()``. Beside ``keras.callbacks.BackupAndRestore``, or with
    ``fit(initial_epoch=...)``, every epoch has the order it would have had.

    Args:
        begin_epoch: the balancer's.
        end_epoch: likewise.
    """

    def __init__(self, begin_epoch: Callable[[int], None], end_epoch: Callable[[], None]) -> None:
        keras.callbacks.Callback.__init__(self)
        self._begin_epoch = begin_epoch
        self._end_epoch = end_epoch

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Hand out this epoch next."""
        self._begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Close the epoch's last step."""
        self._end_epoch()
