"""A few words from every worker to the others, before they have connections of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import context  # not public: it has the coordination service

from ..exceptions import invalid

_LOOK_S = 1.0


class Board(Protocol):
    """Where a value is put once, under a name, and read by anybody."""

    def put(self, name: str, value: Any) -> None:
        """Put a plain value there."""

    def get(self, name: str, look: Callable[[], None] | None = None) -> Any:
        """Return it, once it is there; look around while it is not."""


class ServiceBoard:
    """The strategy's own coordination service. Collective: all workers make as many, in order.

    Any other way would be a collective of TensorFlow's, and those belong to the training alone.

    Args:
        wait_s: seconds to wait for a value.
    """

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._service = context.context()
        number = getattr(self._service, "_evenstep_runs", 0)  # the service never forgets a name
        self._service._evenstep_runs = number + 1
        self._prefix = f"evenstep/{number}/"

    def put(self, name: str, value: Any) -> None:
        """Put a plain value there."""
        self._service.set_config_key_value(self._prefix + name, json.dumps(value))

    def get(self, name: str, look: Callable[[], None] | None = None) -> Any:
        """Return a value, once it is there.

        Args:
            name: of the value.
            look: called once a second while it is not there; it may raise.

        Raises:
            ConnectionError: nobody put it there in time.
        """
        until_s = monotonic() + self._wait_s
        while True:
            left_s = until_s - monotonic()
            wait_s = left_s if look is None else min(left_s, _LOOK_S)
            try:
                text = self._service.get_config_key_value(
                    self._prefix + name, max(int(wait_s * 1000), 1)
                )
                return json.loads(text)
            except tf.errors.OpError as error:
                if look is not None:
                    look()
                if isinstance(error, tf.errors.DeadlineExceededError) and monotonic() < until_s:
                    continue
                raise ConnectionError(
                    f"Nothing was heard from another worker within {self._wait_s:g} s ({name}). "
                    f"All workers have to begin to train together; where some take longer to get "
                    f"there, raise `Runtime(meeting_s=...)`."
                ) from error


def gathered(
    board: Board, rank: int, world_size: int, name: str, value: Any, look: Callable[[], None]
) -> list[Any]:
    """Return what every rank gives, on every rank. Collective.

    Args:
        board: theirs.
        rank: this process.
        world_size: number of workers.
        name: of the values, not used before.
        value: a plain one.
        look: called once a second while others are late.
    """
    board.put(f"{name} of rank {rank}", value)
    if rank == 0:
        said = [board.get(f"{name} of rank {peer}", look) for peer in range(world_size)]
        board.put(name, said)
    result: list[Any] = board.get(name, look)
    return result


def check_alike(board: Board, rank: int, world_size: int, settings: Mapping[str, Any]) -> None:
    """Raise on every worker if any of them has other settings. Collective.

    Args:
        board: theirs.
        rank: this process.
        world_size: number of workers.
        settings: plain values by name, in words: they are shown as they are.

    Raises:
        ValueError: some differ; the message says who and in what.
    """
    board.put(f"settings of rank {rank}", settings)
    if rank == 0:
        try:
            said = [board.get(f"settings of rank {peer}") for peer in range(world_size)]
        except ConnectionError as error:
            board.put("verdict", {"late": str(error)})
            raise
        board.put("verdict", difference(said))
    got = board.get("verdict")
    if isinstance(got, dict):
        raise ConnectionError(got["late"])
    if got is not None:
        raise invalid(
            "Balancer(...)",
            "be made, given data and restored alike on every worker",
            got,
            "Run the same script everywhere, and load the same state on every worker.",
        )


def difference(said: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in words the first thing that is not the same for all; None if everything is."""
    for name, expected in said[0].items():
        for rank, settings in enumerate(said):
            if settings[name] != expected:
                return f"{name}: {expected} on rank 0 and {settings[name]} on rank {rank}"
    return None
