"""A few words from every worker to the others, before they have connections of their own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import context  # not public: it has the coordination service

from ..exceptions import WorkerLostError, invalid
from ._service import asked, lost_behind, missed
from ._workers import Workers

_LOOK_S = 1.0
_OF_SERVICE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)


class Board(Protocol):
    """Where a value is put once, under a name, and read by any worker."""

    def put(self, name: str, value: Any) -> None:
        """Put a plain value there."""

    def get(self, name: str, look: Callable[[], None] | None = None) -> Any:
        """Return it, once it is there; look around while it is not."""


class ServiceBoard:
    """The strategy's own coordination service. Collective: all workers make as many, in order.

    Any other way would be a collective of TensorFlow's, and those belong to the training alone.

    Args:
        workers: who trains together.
        wait_s: seconds to wait for a value.
        deadline_s: seconds without an answer of the service after which the chief is lost.
    """

    def __init__(self, workers: Workers, *, wait_s: float, deadline_s: float) -> None:
        self._workers = workers
        self._deadline_s = deadline_s
        self._wait_s = wait_s
        self._service = context.context()
        number = getattr(self._service, "_evenstep_runs", 0)  # the service never forgets a name
        self._service._evenstep_runs = number + 1
        self._prefix = f"evenstep/{number}/"

    def put(self, name: str, value: Any) -> None:
        """Put a plain value there.

        Raises:
            WorkerLostError: the service is gone, and rank 0 with it.
        """
        self._asked(self._service.set_config_key_value, self._prefix + name, json.dumps(value))

    def get(self, name: str, look: Callable[[], None] | None = None) -> Any:
        """Return a value, once it is there.

        Args:
            name: of the value.
            look: called once a second while it is not there; it may raise. None looks whether
                TensorFlow still hears from all workers.

        Raises:
            ConnectionError: it was not put there in time.
            WorkerLostError: a worker is gone.
        """
        until_s = monotonic() + self._wait_s
        while True:
            limit_ms = max(int(1000 * min(until_s - monotonic(), _LOOK_S)), 1)
            try:
                get = self._service.get_config_key_value
                return json.loads(self._asked(get, self._prefix + name, limit_ms))
            except WorkerLostError:
                if look is not None:
                    look()  # it may know more
                raise
            except tf.errors.DeadlineExceededError as error:
                (look or self._look)()
                if monotonic() < until_s:
                    continue
                raise ConnectionError(
                    f"Nothing was heard from another worker within {self._wait_s:g} s ({name}). "
                    f"All workers have to begin to train together; where some take longer to get "
                    f"there, raise `Runtime(meeting_s=...)`."
                ) from error

    def _asked(self, call: Callable[..., Any], *args: Any) -> Any:
        limit_s = _LOOK_S + self._deadline_s
        try:
            return asked(functools.partial(call, *args), self._workers, within_s=limit_s)
        except _OF_SERVICE as error:
            raise (lost_behind(error, self._workers) or error) from error

    def _look(self) -> None:
        if (lost := missed(self._workers)) is not None:
            raise lost
        # Whether the chief answers: a wait for a value ends in time without it.
        self._asked(self._service.delete_config_key_value, self._prefix + "nothing")


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
        ConnectionError: they did not come together in time.
        WorkerLostError: one of them is gone.
    """
    board.put(f"settings of rank {rank}", settings)
    if rank == 0:
        try:
            said = [board.get(f"settings of rank {peer}") for peer in range(world_size)]
        except (ConnectionError, WorkerLostError) as error:
            board.put("verdict", {"rank": getattr(error, "rank", None), "problem": str(error)})
            raise
        board.put("verdict", difference(said))
    got = board.get("verdict")
    if isinstance(got, dict) and got["rank"] is None:
        raise ConnectionError(got["problem"])
    if isinstance(got, dict):
        raise WorkerLostError(got["rank"], got["problem"])
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
