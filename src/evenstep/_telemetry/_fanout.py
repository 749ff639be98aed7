"""One hook that feeds several, and survives each of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..events import Event, Hook


class Fanout:
    """Passes every event on to all hooks, in order.

    A hook that raises is reported once, through the logger ``evenstep``, and left out from then
    on: telemetry never stops training.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._hooks = list(hooks)

    def __call__(self, event: Event) -> None:
        """Pass ``event`` on."""
        for hook in tuple(self._hooks):
            try:
                hook(event)
            except Exception:
                self._hooks.remove(hook)
                logging.getLogger("evenstep").exception(
                    "The telemetry hook %r raised on %s and is left out from now on; "
                    "training continues.",
                    hook,
                    type(event).__name__,
                )
