"""The one callback of ``model.fit``."""

from __future__ import annotations

from typing import Any, Protocol, final

import keras


class FitListener(Protocol):
    """Is told how ``fit`` goes."""

    def begin_epoch(self, epoch: int) -> None:
        """Hand out ``epoch`` next."""

    def end_epoch(self) -> None:
        """Take notice that an epoch's steps are through."""


@final
class BalancerCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Tells a balancer which epoch ``fit`` is in, so that one that is resumed goes on there.

    Made by ``Balancer.callback()``. Beside ``keras.callbacks.BackupAndRestore``, or with
    ``fit(initial_epoch=...)``, every epoch has the order it would have had.

    Args:
        listener: the balancer's.
    """

    def __init__(self, listener: FitListener) -> None:
        keras.callbacks.Callback.__init__(self)
        self._listener = listener

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Hand out this epoch next."""
        self._listener.begin_epoch(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Close the epoch's last step."""
        self._listener.end_epoch()
