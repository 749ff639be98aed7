"""Which kind of balancer is made: the one environment variable that beats arguments."""

from __future__ import annotations

import os
from typing import TypeVar

from ..exceptions import invalid
from ._exchange._agent import OFF, SWITCH, switch_in

T = TypeVar("T")


def is_off() -> bool:
    """Return whether the environment leaves scripts plain."""
    return switch_in(os.environ) == OFF


def kind_by_switch(kind: type[T]) -> type[T]:
    """Return ``kind``, or the plain kind of balancer where ``EVENSTEP=off``.

    Raises:
        ValueError: ``kind`` is a class of the user's own, of which there is no plain one.
    """
    if not is_off():
        return kind
    from ._off import PlainBalancer  # which is a balancer itself

    if kind not in PlainBalancer.__bases__:
        raise invalid(
            SWITCH, "be left out with a subclass of `Balancer`", OFF, "Use `Balancer` itself."
        )
    return PlainBalancer  # type: ignore[return-value]
